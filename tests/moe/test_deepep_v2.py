"""Backend ``deepep_v2`` against a double of ElasticBuffer that moves rows and enforces its rules."""

from __future__ import annotations

import pytest

from interlock.moe.conformance.processes import run_ranks
from tests.moe import deepep_work


@pytest.mark.parametrize("ranks", [2, 3])
def test_conformance(ranks: int) -> None:
    """Every layout, dtype and size that is declared, bit for bit, with arrival orders that change."""
    for found in run_ranks(deepep_work.conformance, ranks, 40, 7):
        assert found.failures == []
        assert found.cases == 40
