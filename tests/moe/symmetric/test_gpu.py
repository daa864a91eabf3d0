"""Backend ``symmetric`` on a GPU that all ranks share, each a process of its own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.moe.conformance.processes import run_ranks
from tests.moe.symmetric import gpu_work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(("ranks", "cases"), [(1, 36), (2, 72), (4, 48), (8, 36)])
def test_conformance(ranks: int, cases: int) -> None:
    """Counts, order, bytes, scales, weights and sums, in both layouts, bit for bit."""
    for found in run_ranks(gpu_work.conformance, ranks, cases, ranks, collective_timeout=300.0):
        assert found.failures == []
        assert found.cases == cases


@pytest.mark.parametrize("ranks", [2, 4])
def test_replayed_graphs_give_the_bits_of_eager_steps(ranks: int) -> None:
    """1,000 steps: ranks replay graphs of different sizes, with other tokens each time, or have none."""
    for result in run_ranks(gpu_work.graph_replays, ranks, 1000, timeout=500, collective_timeout=300.0):
        assert result == (1000, [])


def test_the_receipt_has_the_bytes_of_the_plan() -> None:
    for found, planned in run_ranks(gpu_work.bytes_allocated, 2):
        assert found == planned


def test_a_late_rank_is_named_by_the_device() -> None:
    """J02: with what was waited for and for how long, and nobody hangs."""
    told = run_ranks(gpu_work.late_rank, 3, 4.0, timeout=120)
    assert told[1] == "late"
    for message in (told[0], told[2]):
        assert "expert-parallel rank 1 did not begin the dispatch" in message
        assert "within 4." in message


def test_rows_that_the_host_waits_for_are_not_captured() -> None:
    for message in run_ranks(gpu_work.contiguous_capture, 2):
        assert message.startswith("contiguous rows (prefill) cannot be captured")


@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_without_a_pause_do_not_meet_in_the_buffers(ranks: int) -> None:
    """B28: ten layers a step and nobody waits for anybody but through the exchange; exact for every step."""
    for wrong in run_ranks(gpu_work.layers_in_a_row, ranks, 100, timeout=400, collective_timeout=300.0):
        assert wrong == 0
