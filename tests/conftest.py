"""Settings that every test shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "interlock", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, max_examples=50
)
settings.load_profile("interlock")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tensors that a test draws without a generator are the same in every run."""
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("interlock")
    group.addoption("--screenshots", metavar="FOLDER", help="take pictures of the page for the docs")
    group.addoption("--page-url", metavar="URL", help="the running server that they show")
