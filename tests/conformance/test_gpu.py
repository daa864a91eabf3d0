"""The suite over NCCL: every rank on the GPUs that are there, several on one where they are few.

Ranks on one GPU take turns, so a case costs a second or so; few cases still walk over every layout and dtype.
"""

from __future__ import annotations

import pytest
import torch

from interlock.moe.conformance.suite import run_conformance
from tests.conformance.test_suite import EXCHANGE_COVERAGE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
FEW = ("contiguous", "masked", "float32", "bfloat16", "fp8", "prefill", "decode", "misuse: n > T")


@pytest.mark.parametrize(("ranks", "cases"), [(2, 64), (4, 32), (8, 32)])
def test_collective_over_nccl(ranks: int, cases: int) -> None:
    report = run_conformance("a2a:collective", ranks=ranks, device="cuda", cases=cases, seed=ranks)
    print(report.text())
    assert report.passed, report.text()
    assert report.cases == cases
    assert [what for what in FEW if not report.coverage.get(what)] == []
    assert (f"{ranks} ranks share a GPU" in report.text()) == (torch.cuda.device_count() == 1)


@pytest.mark.slow
def test_collective_over_nccl_long() -> None:
    report = run_conformance("a2a:collective", ranks=2, device="cuda", cases=400, seed=11)
    assert report.passed, report.text()
    assert [what for what in EXCHANGE_COVERAGE if not report.coverage.get(what)] == []
