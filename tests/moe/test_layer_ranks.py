"""MoE layers over real processes: topologies, determinism, overlapping steps, late ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock.kernels.availability import native_cpu_unavailable
from interlock.moe.conformance.processes import run_ranks
from tests.moe import rank_work

NATIVE = pytest.mark.skipif(native_cpu_unavailable() is not None, reason=str(native_cpu_unavailable()))

WORLDS = [
    *((2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)),
    *((3, 1, 3), (3, 3, 3)),
    *((4, 2, 2), (4, 2, 4), (4, 4, 2), (4, 1, 4)),
]
"""(ranks, attention replicas, EP size)."""


@NATIVE
@pytest.mark.parametrize(("ranks", "attn_dp_size", "ep_size"), WORLDS)
def test_every_topology_equals_the_loop_oracle(ranks: int, attn_dp_size: int, ep_size: int) -> None:
    """B01, B05, B20, B29: replicas of different sizes, idle ones, padding of NaN, every position compared."""
    ran = run_ranks(rank_work.equals_oracle, ranks, "torch", attn_dp_size=attn_dp_size, ep_size=ep_size)
    assert min(ran) == max(ran) >= 2 * rank_work.STEPS


@NATIVE
@pytest.mark.parametrize(("ranks", "attn_dp_size", "ep_size"), [(2, 1, 2), (2, 2, 1), (3, 3, 3), (4, 2, 4)])
def test_deterministic_mode_gives_the_bits_of_one_rank(ranks: int, attn_dp_size: int, ep_size: int) -> None:
    """B05, B21, B30: the same bits over backends, EP sizes, busy or idle companions on other ranks."""
    compared = run_ranks(
        rank_work.equals_one_rank_bit_for_bit, ranks, attn_dp_size=attn_dp_size, ep_size=ep_size
    )
    assert min(compared) >= rank_work.STEPS


@NATIVE
def test_six_experts_on_four_ranks() -> None:
    """B13: the split is balanced, and every backend agrees with it."""
    assert run_ranks(rank_work.uneven_experts, 4) == [2, 2, 1, 1]
    assert run_ranks(rank_work.uneven_experts, 2, attn_dp_size=1, ep_size=1) == [6, 6]


@NATIVE
def test_layers_back_to_back() -> None:
    """B28, B01: 200 repeats of ten layers without a pause, an idle rank in turn: exact."""
    assert run_ranks(rank_work.scaled_identity_layers, 3, 200) == [220] * 3


@pytest.mark.slow
@NATIVE
def test_layers_back_to_back_long() -> None:
    """B28: 20,000 repeats."""
    assert run_ranks(rank_work.scaled_identity_layers, 2, 20_000) == [22_000] * 2


@NATIVE
def test_a_late_rank_is_named() -> None:
    """B03, J02: the wait ends at the time limit with the rank that did not come."""
    message, nothing = run_ranks(rank_work.late_rank, 2)
    assert "expert-parallel rank 1 did not reach the dispatch of step 1 within 0.5 s" in message
    assert nothing == ""


@NATIVE
def test_shared_memory_is_unmapped_and_nameless() -> None:
    """J02: segments have no name that could stay behind, and close unmaps all of them."""
    before = set(Path("/dev/shm").iterdir())
    assert run_ranks(rank_work.mapped_segments, 3) == [(3, 0)] * 3
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if "a2a" in path.name} == set()
