"""The mutation test: twelve seeded faults are found, each in its place, and clean pairs raise no alarm."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from interlock.verify.arm import ArmError
from interlock.verify.compare import Outcome
from interlock.verify.prompts import Prompt
from interlock.verify.run import Settings, Verdict, verify
from tests.verify.faults import FAULTS, Fault
from tests.verify.in_process import side

SETTINGS = Settings(continuation=4)


def test_there_are_twelve() -> None:
    assert len({fault.name for fault in FAULTS}) == 12


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_in_its_place(tiny: Path, prompts: list[Prompt], fault: Fault) -> None:
    control = side("control", tiny, **fault.options)
    candidate = side("candidate", tiny, fault.change, fault.patches, **fault.options)
    if fault.origin is None:
        with pytest.raises(ArmError, match=f"candidate: did not start: .*{fault.words}"):
            verify(control, candidate, prompts, SETTINGS)
        return
    result = verify(control, candidate, prompts, SETTINGS)
    assert result.verdict is Verdict.UNEXPLAINED
    assert result.verdict.exit_code == 1
    worst = result.findings[-1]
    assert worst.outcome is Outcome.DIFFERENT
    assert worst.diagnosis is not None
    assert fault.words in worst.diagnosis.details, worst.diagnosis.details
    found = worst.diagnosis.attribution
    assert found is not None
    assert (found.origin, found.layer) == (fault.origin, fault.layer)
    if fault.position is not None:
        assert found.position == fault.position


MODES = (
    {},
    {"kernels": "torch"},
    {"chunked_prefill_size": 16},
    {"chunked_prefill_size": 24, "kernels": "torch"},
    {"page_size": 8},
    {"prefix_cache": False},
    {"deterministic": True},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "kernels": "torch", "chunked_prefill_size": 32},
    {"kv_cache_dtype": "bfloat16"},
    {"moe_runner_backend": "torch"},
)


def clean_pair(tiny: Path, prompts: list[Prompt], seed: int) -> None:
    dice = random.Random(seed)
    control, candidate = (dice.choice(MODES) for _ in range(2))
    result = verify(side("control", tiny, **control), side("candidate", tiny, **candidate), prompts, SETTINGS)
    alarms = [finding.diagnosis for finding in result.findings if not finding.passes]
    assert not alarms, f"{control} against {candidate}: {alarms}"


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_pair_raises_no_alarm(tiny: Path, prompts: list[Prompt], seed: int) -> None:
    """E14: chunks, prefix cache, kernels and dtypes differ by rounding, and that is all."""
    clean_pair(tiny, prompts, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_fifty_clean_pairs_raise_no_alarm(tiny: Path, prompts: list[Prompt], seed: int) -> None:
    clean_pair(tiny, prompts, 1000 + seed)
