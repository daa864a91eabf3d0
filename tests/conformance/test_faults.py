"""Negative controls: a backend with one fault must fail the suite, for that fault."""

from __future__ import annotations

import os
import re

import pytest

from interlock.errors import InterlockError
from interlock.moe.conformance.processes import run_ranks
from interlock.parallel.topology import Groups
from tests.conformance.faulty import FAULTS, DropsWeights, findings_of

EXPECTED = {
    "ForgetsWeights": "is not token",
    "PaddedCounts": "counts are",
    "SwapsTokens": "combined tokens",
    "SumsUnwritten": "combined tokens",
    "AcceptsTooMany": "misuse was not refused.*n > T",
    "CombinesTwice": "misuse was not refused.*combine twice",
    "LiesAboutItsName": "receipt: dispatcher is 'somewhere.else:Ordinary'",
    "LosesTheLastLane": "counts are",
}


def all_findings(groups: Groups) -> dict[str, list[str]]:
    return {fault.__name__: findings_of(groups, fault.__name__).failures for fault in FAULTS}


def test_every_fault_is_found() -> None:
    """One rank, uninitialised memory full of NaN: each mutant fails with the message of its own fault."""
    found = run_ranks(all_findings, 1)[0]
    assert found.keys() == EXPECTED.keys()
    for fault, failures in found.items():
        assert failures, f"{fault} passed"
        assert any(re.search(EXPECTED[fault], failure) for failure in failures), failures


def test_a_declaration_that_leaves_weights_to_nobody_ends_the_suite() -> None:
    with pytest.raises(InterlockError, match="runners apply weights and dispatched rows without weights"):
        run_ranks(findings_of, 1, DropsWeights.__name__)


def dies(groups: Groups) -> None:
    if groups.world.rank == 1:
        raise RuntimeError("boom on rank 1")
    groups.world.barrier()


def exits(groups: Groups) -> None:
    if groups.world.rank == 1:
        os._exit(7)
    groups.world.barrier()


def test_the_first_failure_of_a_rank_is_what_is_reported() -> None:
    """J02, J03: the others wait in a collective; they are ended and the cause is on top."""
    with pytest.raises(InterlockError, match=r"(?s)rank 1 raised:.*boom on rank 1"):
        run_ranks(dies, 3)
    with pytest.raises(InterlockError, match="rank 1 died with exit code 7"):
        run_ranks(exits, 2)
