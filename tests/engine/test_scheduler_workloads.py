"""Random workloads: whatever arrives, leaves or runs short, every client gets exactly its tokens.

Cases F06, F07, F08, F09, F12, F15, F17, F25, E06 of the public reports, and the admission that cannot
deadlock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.simulation import VOCAB, Simulation, check_pages, sim_plan

WINDOWS = {"full": (None,), "hybrid": (None, 6, 8), "window": (8, 5)}
SHARED = [[(i * 7 + j) % VOCAB for j in range(70)] for i in range(3)]


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Often a prefix that others have too, so that the tree branches at every depth."""
    length = min(rng.randint(1, longest), rng.randint(1, longest))
    prompt = rng.choice(SHARED)[: rng.choice([0, rng.randint(0, length)])]
    return (prompt + [rng.randrange(VOCAB) for _ in range(length - len(prompt))])[:length]


def random_params(rng: random.Random, longest: int) -> dict[str, Any]:
    max_tokens = rng.choice([0, 1, *[rng.randint(0, longest) for _ in range(6)]])
    return {
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, 0, rng.randint(0, max_tokens)]),
        "ignore_eos": rng.random() < 0.3,
        "stop_token_ids": tuple(rng.sample(range(VOCAB), 3)) if rng.random() < 0.3 else (),
        "prompt_logprobs": 0 if rng.random() < 0.1 else None,
        "priority": rng.choice([0, 0, 0, -1, 2]),
    }


def run_workload(
    seed: int,
    requests: int,
    windows: Sequence[int | None],
    *,
    abort_rate: float = 0.08,
    looks_ahead: bool = False,
    **plan: Any,
) -> Simulation:
    rng = random.Random(seed)
    sim = Simulation(sim_plan(windows, **plan))
    limit = sim.scheduler._max_model_len
    added = 0
    while added < requests or sim.scheduler.has_work:
        for _ in range(rng.choice([0, 1, 1, 2, 8]) if added < requests else 0):
            prompt = random_prompt(rng, limit * 2 // 3)
            sim.add(prompt, **random_params(rng, limit - len(prompt)))
            added += 1
        if rng.random() < abort_rate:
            name = rng.choice([*sim.streams, "unknown"])
            sim.abort(name)
            sim.abort(name)
        if rng.random() < 0.01:
            sim.scheduler.flush_cache()
        batch = sim.scheduler.schedule()
        if batch is None:
            assert not sim.scheduler.has_work
            continue
        sampled = None
        while batch is not None:
            sampled = sim.model.forward(batch, sampled)
            if rng.random() < abort_rate:
                sim.abort(rng.choice([*sim.streams, "unknown"]))
            ahead = sim.scheduler.schedule_ahead() if looks_ahead and rng.random() < 0.95 else None
            sim.ahead_steps += ahead is not None
            sim.receive(sim.scheduler.commit(batch, sampled))
            check_pages(sim.scheduler)
            batch = ahead
    sim.verify_all()
    sim.verify_empty()
    return sim


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_workload_under_pressure(windows: str, page_size: int) -> None:
    """F06, F09: a pool that barely holds one longest request, with aborts at every stage."""
    layers = WINDOWS[windows]
    sim = run_workload(
        page_size,
        60,
        layers,
        page_size=page_size,
        max_model_len=64,
        full_pages=-(-64 // page_size),
        window_pages=-(-8 // page_size) + 2,
        chunked_prefill_size=16,
    )
    if windows == "full":
        assert sim.scheduler.stats().retractions_total > 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    windows=st.sampled_from([*WINDOWS.values()]),
    page_size=st.sampled_from([1, 2, 4, 7, 16]),
    chunk=st.sampled_from([1, 3, 16, 100]),
    slack=st.sampled_from([0, 3, 40]),
    rows=st.integers(1, 6),
    cached=st.booleans(),
    ahead=st.booleans(),
)
def test_any_workload_finishes_with_the_right_tokens(
    seed: int,
    windows: Sequence[int | None],
    page_size: int,
    chunk: int,
    slack: int,
    rows: int,
    cached: bool,
    ahead: bool,
) -> None:
    """For any pool that holds one longest request the workload ends, and nothing is lost or doubled."""
    run_workload(
        seed,
        12,
        windows,
        page_size=page_size,
        max_model_len=48,
        full_pages=-(-48 // page_size) + slack,
        window_pages=-(-8 // page_size) + 1 + slack,
        chunked_prefill_size=chunk,
        max_running_requests=rows,
        prefix_cache=cached,
        looks_ahead=ahead,
    )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("windows", "requests"), [("full", 120), ("hybrid", 120), ("window", 120)])
def test_workload_with_every_kind_of_trouble(windows: str, requests: int, ahead: bool) -> None:
    """F06: aborts, disconnects while a step runs, flushes, retractions and refusals in one workload."""
    check_long_workload(windows, requests, ahead)


@pytest.mark.slow
@pytest.mark.parametrize("windows", ["full", "hybrid", "window"])
def test_workload_of_2000_requests(windows: str) -> None:
    """The same with 2,000 requests."""
    check_long_workload(windows, 2000)


def check_long_workload(windows: str, requests: int, ahead: bool = False) -> None:
    sim = run_workload(
        requests,
        requests,
        WINDOWS[windows],
        page_size=4,
        max_model_len=96,
        full_pages=26,
        window_pages=36,
        chunked_prefill_size=24,
        max_running_requests=12,
        looks_ahead=ahead,
    )
    assert (sim.ahead_steps > requests // 4) == ahead
    stats = sim.scheduler.stats()
    assert stats.aborts_total > requests // 100
    assert stats.prefix_hits_total > 0
    assert stats.retractions_total > 0 or windows == "window"
    assert len(sim.streams) >= requests
