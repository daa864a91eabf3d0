"""Backend ``deepep_v2`` on the real DeepEP 2.1, several ranks on one GPU: EP_DISABLE_GIN=1, NCCL 2.30."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from interlock.moe.conformance.processes import Gpus, run_ranks
from interlock.moe.conformance.suite import run_conformance
from tests.moe import deepep_work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="DeepEP is not installed"),
]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_conformance(ranks: int) -> None:
    """Counts, order, bytes, scales, weights and sums of bfloat16 and fp8 rows, bit for bit."""
    report = run_conformance("a2a:deepep_v2", ranks=ranks, device="cuda", cases=48)
    print(report.text())
    assert report.passed, report.text()
    wanted = (
        "contiguous",
        "masked",
        "bfloat16",
        "fp8",
        "n = 0 on a rank",
        "n = T on a rank",
        "misuse: n > T",
    )
    assert [what for what in wanted if not report.coverage.get(what)] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_replayed_graphs_give_the_bits_of_eager_steps(ranks: int) -> None:
    """1,000 replays with other tokens, numbers of tokens and idle ranks."""
    for done, wrong, mode in run_ranks(deepep_work.graph_replays, ranks, 1000, gpus=Gpus(ranks), timeout=300):
        assert (done, wrong, mode) == (1000, [], "direct")
