"""The symmetric exchange on a CPU, all ranks in one thread, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")
if not triton.knobs.runtime.interpret:
    pytest.skip("set TRITON_INTERPRET=1 to run the GPU kernels on the CPU", allow_module_level=True)

from interlock.moe.a2a.symmetric import BACKEND  # noqa: E402
from interlock.moe.conformance.cases import Setting, make_case  # noqa: E402
from interlock.moe.conformance.cases import settings as walk  # noqa: E402
from interlock.moe.conformance.oracle import combined  # noqa: E402
from interlock.moe.conformance.received import check_received, computed  # noqa: E402
from tests.moe.symmetric.simulated import Simulated  # noqa: E402


def exchange_and_check(ranks: Simulated, setting: Setting, number: int, seed: int) -> None:
    case = make_case(setting, number, seed)
    received = ranks.dispatch(case, case.phase)
    assert ranks.problems() == []
    results = []
    for rank, (rows, _) in enumerate(received):
        check_received(rows, case, setting, rank, ordered=True)
        results.append(computed(rows, setting, rank))
    for rank, out in enumerate(ranks.combine(case, results, [arrived for _, arrived in received])):
        assert torch.equal(out, combined(case, setting, rank)), (case.label, rank)
    assert ranks.problems() == []


@settings(max_examples=25, deadline=None)
@given(ranks=st.sampled_from((1, 2, 3, 4, 8)), seed=st.integers(0, 10_000))
def test_any_exchange_is_the_oracles(ranks: int, seed: int) -> None:
    """Rows, counts, order, scales, weights and sums, in buffers that three steps share."""
    setting = next(iter(walk(BACKEND, ranks, seed)))
    simulated = Simulated.of(setting)
    for number in range(3):
        exchange_and_check(simulated, setting, number, seed)
