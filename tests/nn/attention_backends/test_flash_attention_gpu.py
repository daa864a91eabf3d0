"""Backend ``flash_attention`` on the real FlashAttention-3: against the reference, and in a graph."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from interlock.nn.attention_backends.base import AttentionSpec
from interlock.nn.attention_backends.flash_attention.backend import FlashAttention
from tests.kernels.cases import REFERENCE, PagedCase, close, paged_case
from tests.nn.attention_backends.test_flash_attention import whole_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("flash_attn_interface") is None, reason="FlashAttention-3 is not installed"
    ),
]
TENSORS = ("q", "k_cache", "v_cache", "page_table", "query_start", "kv_len", "sinks")
LENGTHS = {
    "decode": [(1, 40), (1, 700), (1, 1), (1, 129)],
    "prefill": [(130, 130), (7, 300), (64, 900)],
}


def on_gpu(case: PagedCase) -> PagedCase:
    return replace(case, **{n: getattr(case, n).cuda() for n in TENSORS if getattr(case, n) is not None})


@pytest.mark.parametrize("widths", [(192, 128), (128, 128)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_reference(
    lengths: list[tuple[int, int]], window: int | None, sinks: bool, widths: tuple[int, int]
) -> None:
    sizes = {"nh": 16, "kvh": 4, "hd": widths[0], "vd": widths[1], "padding": 3}
    case = paged_case(lengths, window=window, sinks=sinks, dtype=torch.bfloat16, **sizes)
    attention = FlashAttention(AttentionSpec(REFERENCE))
    moved = on_gpu(whole_pages(case))
    got = attention.run(moved.q, **moved.arguments()).cpu()
    close(got, case.in_float64(), rtol=2**-6, atol=4e-3)
    assert not got[len(got) - 3 :].any()


def test_a_captured_step_reads_what_its_tensors_hold_then() -> None:
    """Lengths, tables and queries change between replays."""
    cases = [
        on_gpu(
            whole_pages(
                paged_case(
                    [(1, keys), (1, 2 * keys)],
                    hd=192,
                    vd=128,
                    window=16,
                    sinks=True,
                    dtype=torch.bfloat16,
                    seed=keys,
                )
            )
        )
        for keys in (90, 95)
    ]
    first, second = cases
    attention = FlashAttention(AttentionSpec(REFERENCE))
    attention.run(first.q, **first.arguments())
    static = replace(first, **{name: getattr(first, name).clone() for name in TENSORS})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(static.q, **static.arguments())
    for case in (second, first):
        for name in TENSORS:
            getattr(static, name).copy_(getattr(case, name))
        graph.replay()
        torch.testing.assert_close(out, attention.run(case.q, **case.arguments()))
