"""Short runs of the hostile modules; the long ones are marked slow.

What is held here does not depend on the speed of the machine: no 5xx, every request accounted for, everything
free in the end. Times and memory are judged by the modules' own long runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.e2e.processes import Served
from tests.hostile import fuzz, overload, schema, soak, vanish
from tests.hostile.cases import Cases
from tests.hostile.watch import Memory, is_alive, seconds_until_free, started


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with started([]) as served:
        yield served


def test_cases_are_reproducible_and_of_every_kind() -> None:
    first, second = Cases(3), Cases(3)
    made = [first.next() for _ in range(400)]
    assert made == [second.next() for _ in range(400)]
    assert len({case.kind for case in made}) == 11


def check_fuzz(served: Served, requests: int, seed: int) -> None:
    memory = Memory(served)
    findings = asyncio.run(fuzz.fuzz(served, requests, at_once=8, seed=seed, memory=memory))
    assert findings.faults == []
    assert sum(findings.sent.values()) == requests
    assert findings.statuses[200] > 0
    assert findings.statuses[400] > 0
    assert is_alive(served)
    assert seconds_until_free(served) < 60
    assert "Traceback" not in served.process.text


def test_hostile_requests_get_no_5xx(server: Served) -> None:
    """G17, G18: over real sockets, with everything that is no HTTP, in front of a real engine."""
    check_fuzz(server, 200, seed=11)


def test_vanishing_clients_leave_nothing_behind(server: Served) -> None:
    """F08: while sending, waiting and reading, with a reset or without."""
    files = Memory(server).open_files()
    seen = asyncio.run(vanish.vanish(server, 40, at_once=20, seed=5))
    assert sum(seen.values()) == 40
    assert len(seen) >= 3
    assert seconds_until_free(server) < 60
    assert is_alive(server)
    assert Memory(server).open_files() <= files + 20


def test_every_request_of_a_busy_server_is_accounted_for(server: Served) -> None:
    memory = Memory(server)
    counts = asyncio.run(soak.soak(server, 3.0, at_once=8, seed=2, memory=memory))
    assert seconds_until_free(server) < 60
    assert counts["completed"] > 0
    assert counts["aborted"] + counts["refused"] > 0
    assert soak.unaccounted(server, counts) == []


def test_an_overloaded_server_refuses_and_goes_on_serving() -> None:
    """F24: a short queue, 429 for the rest, and whole answers for those who got in."""
    with started(overload.SERVER) as served:
        flood = asyncio.run(overload.flooded(served.url, 2.0, 150.0, seed=1))
        assert flood.other == 0
        assert flood.refused > 0
        assert flood.completed >= overload.SLOTS
        assert seconds_until_free(served) < 60
        assert is_alive(served)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_hostile_requests_get_no_5xx_long(server: Served, seed: int) -> None:
    check_fuzz(server, 5000, seed)


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server: Served) -> None:
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    done = schema.run(server, 200, seed=1)
    assert done.returncode == 0, done.stdout[-3000:]
    assert seconds_until_free(server) < 60
