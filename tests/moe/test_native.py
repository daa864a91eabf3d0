"""Compiled routing and row lists give what the torch versions give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.base import ExpertRows
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.contract import ContractError
from interlock.moe.a2a.rows import ContiguousRows, MaskedRows, ReplicatedRows
from interlock.moe.layouts import aligned_segments, expert_rows
from interlock.moe.native_moe import NativeMoE, native_moe
from interlock.moe.routing import Router, Routes, choose_experts
from tests.moe.oracle import make_card

pytestmark = pytest.mark.skipif(native_cpu_unavailable() is not None, reason=str(native_cpu_unavailable()))


@pytest.fixture(scope="module")
def native() -> NativeMoE:
    found = native_moe(get_kernels("cpu", threads=1))
    assert found is not None
    return found


def test_reference_kernels_route_in_torch() -> None:
    assert native_moe(get_kernels("torch", threads=1)) is None


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.sampled_from([(1, 1), (8, 2), (8, 8), (24, 12), (128, 8), (384, 8)]),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    normalise=st.booleans(),
    with_bias=st.booleans(),
    nasty=st.sampled_from(["plain", "ties", "-inf", "nan", "huge"]),
    scale=st.sampled_from([1.0, 2.5]),
    tokens=st.integers(0, 9),
)
def test_routes_equal_torch(
    native: NativeMoE,
    seed: int,
    sizes: tuple[int, int],
    scoring: str,
    normalise: bool,
    with_bias: bool,
    nasty: str,
    scale: float,
    tokens: int,
) -> None:
    """C01, C03, C04, C07, C10: ids are the same, weights within the last bit, NaN where torch has NaN."""
    card = make_card(
        *sizes,
        scoring=scoring,
        normalise_top_k=normalise,
        has_selection_bias=with_bias,
        routed_scaling_factor=scale,
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, sizes[0], generator=generator) * (200 if nasty == "huge" else 3)
    holes = torch.rand(logits.shape, generator=generator) < 0.6
    if nasty == "ties":
        logits = logits.round()
    if nasty == "-inf":
        logits = logits.masked_fill(holes, -torch.inf)
        logits[:, 0] = 0.0
    if nasty == "nan":
        logits = logits.masked_fill(holes & (torch.arange(tokens) % 2 == 0).unsqueeze(1), torch.nan)
    bias = torch.randn(sizes[0], generator=generator) * 3 if with_bias else None
    live = max(0, tokens - 2)
    ids, weights = native.route(logits, bias, card, live)
    wanted = choose_experts(logits, bias, card)
    assert torch.equal(ids[:live], wanted.ids[:live])
    torch.testing.assert_close(weights[:live], wanted.weights[:live], rtol=2e-7, atol=0, equal_nan=True)
    assert ids[live:].eq(-1).all()
    assert weights[live:].eq(0).all()


def assert_same(ours: ExpertRows, theirs: ExpertRows) -> None:
    for name in ("offsets", "source", "target", "weight"):
        mine, wanted = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == wanted.dtype
        assert mine.is_contiguous()
        assert torch.equal(mine, wanted), name


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 20),
    experts=st.integers(1, 9),
    alignment=st.sampled_from([1, 4, 128]),
    weighted=st.booleans(),
)
def test_lists_equal_torch(
    native: NativeMoE, seed: int, tokens: int, experts: int, alignment: int, weighted: bool
) -> None:
    """B09, B26: the same work, row by row, in all three layouts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (tokens, 3), generator=generator)
    weights = torch.rand(tokens, 3, generator=generator) if weighted else None
    replicated = ReplicatedRows(torch.zeros(tokens, 4), ids, weights)
    assert_same(native.expert_rows(replicated, experts), expert_rows(replicated, experts))

    counts = torch.randint(0, 6, (experts,), generator=generator)
    segments = aligned_segments(counts, alignment)
    row_weights = torch.rand(segments.rows, generator=generator) if weighted else None
    contiguous = ContiguousRows(
        torch.zeros(segments.rows, 4), segments.psum.int(), counts.int(), alignment, row_weights
    )
    assert_same(native.expert_rows(contiguous, experts), expert_rows(contiguous, experts))

    slab_weights = torch.rand(experts, 7, generator=generator) if weighted else None
    masked = MaskedRows(torch.zeros(experts, 7, 4), counts.int(), slab_weights)
    assert_same(native.expert_rows(masked, experts), expert_rows(masked, experts))


def test_what_does_not_fit_is_refused(native: NativeMoE) -> None:
    """B24: ids beyond the table and counts beyond the rows never reach a kernel."""
    with pytest.raises(ContractError, match="below 3, 3 was given"):
        native.expert_rows(ReplicatedRows(torch.zeros(1, 4), torch.tensor([[3]]), None), 3)
    counts = torch.tensor([1, 9], dtype=torch.int32)
    with pytest.raises(ContractError, match="do not fit"):
        native.expert_rows(MaskedRows(torch.zeros(2, 8, 4), counts, None), 2)
    with pytest.raises(ContractError, match="do not fit"):
        native.expert_rows(ContiguousRows(torch.zeros(8, 4), counts, counts, 1, None), 2)


def test_a_router_on_native_kernels_routes_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Routes:
        raise AssertionError("the torch version ran")

    monkeypatch.setattr("interlock.moe.routing.choose_experts", never)
    card = make_card(24, 4, has_selection_bias=False)
    router = Router(card, 8, get_kernels("cpu", threads=1), torch.device("cpu"))
    router.load(torch.randn(24, 8), None)
    assert router.route(torch.randn(3, 8), 2).ids.shape == (3, 4)
