"""One server that many tests ask, and nothing left behind by any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.processes import Served, answers, serving

Answers = tuple[list[list[str]], list[list[float]]]


@pytest.fixture(scope="session")
def one_process() -> Answers:
    """What one rank answers to ``PROMPTS``."""
    with serving() as served:
        return answers(lambda body: served.post("/v1/completions", body).raise_for_status().json())


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served
