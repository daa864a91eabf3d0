"""The transfer backends that tests run, with the reason where one cannot be."""

from __future__ import annotations

from functools import cache

import pytest

from interlock.plan.disaggregation import transfer_problem
from interlock.plan.facts import MachineFacts, probe
from interlock.plan.join import Declarations

NAMES = ("shared_memory", "mooncake", "nixl")


@cache
def facts() -> MachineFacts:
    declared = Declarations.registered()
    return probe(packages=declared.packages(), libraries=declared.libraries())


def need(name: str, device: str = "cpu") -> None:
    """Skip the test where the backend is not ready, with what the planner would say."""
    problem = transfer_problem(Declarations.registered().transfers[name], facts(), device)
    if problem is not None:
        pytest.skip(f"transfer backend {name} {problem}")
