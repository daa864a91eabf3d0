"""Backend ``flash_attention`` on a double of FlashAttention-3 that enforces its rules, and the reference."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import StartupError
from interlock.moe.terms import Phase
from interlock.nn.attention_backends.base import AttentionSpec
from interlock.nn.attention_backends.flash_attention.backend import (
    FlashAttention,
    apply_sinks,
    held_pages,
    load_with_kvcache,
)
from tests.harness import Harness, build_model, run_chunks
from tests.kernels.cases import REFERENCE, PagedCase, close, generator, paged_case
from tests.nn.attention_backends.flash_double import FlashAttention3
from tests.tiny import flash, tiny_folder

EXACT = (torch.float32, torch.float64)
"""Dtypes in which the double may compute to be compared closely."""
PROMPT = [int(token) for token in torch.randint(0, 512, (70,), generator=generator(3))]


def backend(double: FlashAttention3) -> FlashAttention:
    return FlashAttention(AttentionSpec(REFERENCE), double.module().flash_attn_with_kvcache)


def whole_pages(case: PagedCase) -> PagedCase:
    """Pages that are held have all keys of their sequence, those behind the window too: large ones."""
    page_size = case.k_cache.shape[1]
    for table, keys in zip(case.page_table.tolist(), case.kv_len.tolist(), strict=True):
        for index, page in enumerate(table):
            written = max(0, min(page_size, keys - index * page_size))
            if page >= 0:
                for cache in (case.k_cache, case.v_cache):
                    cache[page, :written].nan_to_num_(nan=1e3)
    return case


LENGTHS = st.lists(
    st.integers(1, 20).flatmap(lambda queries: st.tuples(st.just(queries), st.integers(queries, 90))),
    min_size=1,
    max_size=4,
)


@given(
    lengths=LENGTHS,
    window=st.one_of(st.none(), st.integers(1, 40)),
    sinks=st.booleans(),
    widths=st.sampled_from([(192, 128), (128, 128), (32, 32), (64, 16)]),
    padding=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16]),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_reference(
    lengths: list[tuple[int, int]],
    window: int | None,
    sinks: bool,
    widths: tuple[int, int],
    padding: int,
    page_size: int,
) -> None:
    """Windows, sinks, groups, pages out of order, padding; nothing of pages that are given up is used."""
    sizes = {"hd": widths[0], "vd": widths[1], "padding": padding, "page_size": page_size}
    case = whole_pages(paged_case(lengths, window=window, sinks=sinks, **sizes))
    case.scale *= 0.7
    got = backend(FlashAttention3(EXACT)).run(case.q, **case.arguments())
    close(got, case.in_float64(), rtol=1e-4, atol=1e-5)
    assert not got[len(got) - padding :].any()


@pytest.mark.parametrize("window", [None, 8])
def test_in_bfloat16_it_is_rounded_twice_at_most(window: int | None) -> None:
    lengths = [(1, 40), (9, 33), (1, 1)]
    case = paged_case(lengths, hd=192, vd=128, window=window, sinks=True, dtype=torch.bfloat16)
    whole_pages(case)
    got = backend(FlashAttention3()).run(case.q, **case.arguments())
    assert got.dtype == torch.bfloat16
    close(got, case.in_float64(), rtol=2**-7, atol=1e-3)


def test_a_window_is_keys_including_the_token_itself() -> None:
    double = FlashAttention3(EXACT)
    attention = backend(double)
    for window in (None, 1, 8):
        case = paged_case([(3, 30)], window=window)
        attention.run(case.q, **case.arguments())
    assert [call["window_size"] for call in double.calls] == [(-1, -1), (0, 0), (7, 0)]
    assert all(call["causal"] for call in double.calls)


def test_a_decode_step_is_known_to_have_one_query_a_sequence() -> None:
    double = FlashAttention3(EXACT)
    attention = backend(double)
    for lengths in ([(1, 5), (1, 9)], [(4, 5), (2, 9)]):
        case = paged_case(lengths)
        attention.run(case.q, **case.arguments())
    assert [call["max_seqlen_q"] for call in double.calls] == [1, 6]


def test_keys_are_not_split_where_sequences_fill_the_gpu() -> None:
    """Two key-value heads a sequence; the workspace of splits is bounded so."""
    double = FlashAttention3(EXACT)
    attention = backend(double)
    for sequences in (2, 65, 66):
        case = paged_case([(1, 5)] * sequences)
        attention.run(case.q, **case.arguments())
    assert [call["num_splits"] for call in double.calls] == [0, 0, 1]


@given(
    scores=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20),
    sink=st.floats(-40, 40, width=32),
    seed=st.integers(0, 100),
)
@settings(max_examples=100, deadline=None)
def test_a_sink_after_attention_is_one_more_logit(scores: list[float], sink: float, seed: int) -> None:
    """Against the definition in float64: softmax over the scores and the sink, whose value is 0."""
    logits = torch.tensor(scores, dtype=torch.float64)
    values = torch.randn(len(scores), 4, generator=generator(seed), dtype=torch.float64)
    want = torch.softmax(torch.cat((logits, torch.tensor([sink], dtype=torch.float64))), 0)[:-1] @ values
    out = (torch.softmax(logits, 0) @ values).float().view(1, 1, 4)
    lse = logits.logsumexp(0).float().view(1, 1)
    apply_sinks(out, lse, torch.tensor([sink], dtype=torch.float32))
    torch.testing.assert_close(out.double().view(4), want, rtol=2e-5, atol=1e-7)


def test_sinks_are_applied_in_float32() -> None:
    """bfloat16 results are scaled by a factor that is not rounded before."""
    out = torch.full((5, 2, 8), 1.0, dtype=torch.bfloat16)
    lse, sinks = torch.linspace(-3, 3, 10).view(2, 5), torch.tensor([0.3, -0.7])
    apply_sinks(out, lse, sinks)
    want = torch.sigmoid(lse.double().t() - sinks.double()).to(torch.bfloat16)
    assert torch.equal(out, want.unsqueeze(-1).expand(5, 2, 8))


def test_sequences_begin_with_the_first_page_that_is_held() -> None:
    """Rows of no sequence may hold what was there before."""
    table = torch.tensor([[-1, -1, 7, 3], [5, 2, -1, -1], [-1, -1, -1, -1], [-1, 4, 4, 4]], dtype=torch.int32)
    got = held_pages(table, torch.tensor([60, 20, 0, 0], dtype=torch.int32), 16)
    assert got.table[:2, :2].tolist() == [[7, 3], [5, 2]]
    assert got.kv_len.tolist() == [28, 20, 0, 0]
    assert (got.table.dtype, got.kv_len.dtype) == (torch.int32, torch.int32)


def test_pages_are_looked_at_once_for_all_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    where = "interlock.nn.attention_backends.flash_attention.backend.held_pages"
    monkeypatch.setattr(where, lambda *given: made.append(given) or held_pages(*given))
    attention = backend(FlashAttention3(EXACT))
    for _ in range(2):
        case = whole_pages(paged_case([(1, 30)], window=8))
        for _ in range(3):
            close(attention.run(case.q, **case.arguments()), case.in_float64(), rtol=1e-4)
    assert len(made) == 2


def test_without_tokens_the_library_is_not_called() -> None:
    double = FlashAttention3()
    case = paged_case([(0, 5)], dtype=torch.bfloat16)
    assert backend(double).run(case.q, **case.arguments()).shape == (0, 6, 32)
    assert double.calls == []


BFLOAT16 = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}


def engine(monkeypatch: pytest.MonkeyPatch, double: FlashAttention3, **plan: Any) -> Harness:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", double.module())
    return build_model(tiny_folder(flash()), attention_backend="flash_attention", **plan)


@pytest.mark.parametrize("chunks", [None, [40, 1, 1, 16, 1]], ids=["at once", "in chunks"])
def test_an_engine_computes_what_it_does_with_its_own_kernel(
    monkeypatch: pytest.MonkeyPatch, chunks: list[int] | None
) -> None:
    """MiMo-V2's features together (192/128 heads, windows, sinks, value scale), in float32; pages behind the
    window are given up and poisoned on the way."""
    harness = engine(monkeypatch, double := FlashAttention3(EXACT))
    got = run_chunks(harness, PROMPT, chunks, padding=2)
    want = run_chunks(build_model(tiny_folder(flash())), PROMPT, chunks, padding=2)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)
    assert len(double.calls) == len(harness.model.layers) * (len(chunks) + 1 if chunks else 1)


def test_an_engine_in_bfloat16_keeps_the_rules_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    got = run_chunks(engine(monkeypatch, FlashAttention3(), **BFLOAT16), PROMPT, 16)
    want = run_chunks(build_model(tiny_folder(flash()), **BFLOAT16), PROMPT, 16)
    assert float((got - want).abs().mean()) < 0.1
    assert float((got.argmax(-1) == want.argmax(-1)).float().mean()) > 0.85


def test_several_sequences_and_padding_in_one_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for harness in (engine(monkeypatch, FlashAttention3(EXACT)), build_model(tiny_folder(flash()))):
        sequences = [harness.new_sequence(64) for _ in range(3)]
        work = [(each, PROMPT[at : at + 30 + at]) for at, each in enumerate(sequences)]
        harness.step(work)
        rows.append(harness.step([(each, PROMPT[5:6]) for each in sequences], padding=3, phase=Phase.DECODE))
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_receipts_show_what_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = engine(monkeypatch, FlashAttention3(EXACT))
    assert harness.model.observed()["attention_backend"] is None, "no layer called it yet"
    run_chunks(harness, PROMPT, 35)
    shown = harness.model.observed()
    layers, windowed = len(harness.model.layers), sum(a.attention.window is not None for a in card(harness))
    assert shown["attention_backend"] == "flash_attention"
    assert shown["attention"] == {
        "name": "flash_attention",
        "entry": "flash_attn_interface.flash_attn_with_kvcache",
        "calls": 2 * layers,
        "rows": 70 * layers,
        "extra": {"rows_with_sinks": 70 * windowed},
    }


def card(harness: Harness) -> tuple[Any, ...]:
    return harness.plan.card.layers


def test_receipts_of_the_kernel_set_name_its_kernel() -> None:
    harness = build_model(tiny_folder(flash()))
    run_chunks(harness, PROMPT[:4])
    shown = harness.model.observed()
    assert shown["attention_backend"] == "paged_attention"
    assert shown["attention"]["entry"] == "interlock.kernels.torch_reference.TorchKernels.paged_attention"
    assert shown["attention"]["calls"] == len(harness.model.layers)


def test_a_package_that_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(StartupError, match=r"cannot load the package flash-attn-3.*paged_attention needs no"):
        load_with_kvcache()
