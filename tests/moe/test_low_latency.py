"""Backends ``deepep`` (v1) and ``mooncake`` against doubles that move rows and enforce their rules."""

from __future__ import annotations

import pytest

from interlock.moe.conformance.processes import run_ranks
from tests.moe import deepep_work


@pytest.mark.parametrize("work", [deepep_work.legacy_conformance, deepep_work.mooncake_conformance])
def test_conformance(work) -> None:
    """Every layout and size that is declared: counts, rows, weights, and sums bit for bit."""
    for found in run_ranks(work, 2, 36, 3):
        assert found.failures == []
        assert found.cases == 36
