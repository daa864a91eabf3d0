"""What one process answers, and one server that many tests ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.processes import Served, answers, serving

Answers = tuple[list[list[str]], list[list[float]]]


@pytest.fixture(scope="session")
def one_process() -> Answers:
    """What one rank answers to ``PROMPTS``."""
    with serving() as served:
        return answers(lambda body: served.post("/v1/completions", body).raise_for_status().json())


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served
