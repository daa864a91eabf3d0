"""The last minute out of running sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.load_history import BASE_SECONDS, POINTS, WINDOW_SECONDS, LoadHistory
from interlock.engine.messages import PhaseLoad, RankLoad, SchedulerStats
from interlock.server.load_view import balancedness, expert_imbalance, expert_rows, rank_rows


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def phase(steps: int, rows: list[list[int]] | None = None) -> PhaseLoad:
    counts = np.array(rows if rows is not None else [[steps, 2 * steps]], dtype="<i8")
    return PhaseLoad(
        capacity=10,
        steps=steps,
        tokens=4 * steps,
        most_tokens=4,
        dispatch_seconds=0.002 * steps,
        dispatch_calls=2 * steps,
        combine_seconds=0.0,
        combine_calls=0,
        rows=counts.tobytes(),
    )


def load(
    steps: int, *, rank: int = 0, first: int = 0, is_slice: bool = False, **rows: list[list[int]]
) -> RankLoad:
    return RankLoad(
        rank=rank,
        layers=(5,) if not rows else tuple(range(len(rows["decode"]))),
        first_expert=first,
        experts=2,
        is_slice=is_slice,
        sample_every=8,
        prefill=phase(0, [[0, 0]] * len(rows["decode"]) if rows else None),
        decode=phase(steps, rows.get("decode")),
    )


@given(st.lists(st.floats(0.2, 30), min_size=1, max_size=60))
def test_the_window_is_a_minute_and_at_most_one_base_more(gaps: list[float]) -> None:
    """Steps of one in each report: the window counts those of the last minute, and maybe a little more."""
    clock = Clock()
    history = LoadHistory(clock)
    times = []
    for steps, gap in enumerate(gaps, start=1):
        clock.now += gap
        times.append(clock.now)
        history.note_rank(load(steps))
    (window,) = history.window()
    recent = sum(at > clock.now - WINDOW_SECONDS for at in times)
    longer = sum(at > clock.now - WINDOW_SECONDS - BASE_SECONDS - max(gaps) for at in times)
    assert recent <= window.decode.steps <= longer
    assert window.rows.tolist() == [[window.decode.steps, 2 * window.decode.steps]]
    if window.decode.steps:
        assert window.decode.capacity_use == pytest.approx(0.4)
        assert window.decode.dispatch_seconds == pytest.approx(0.001)
    assert window.decode.combine_seconds is None
    assert len(history._bases[0]) <= WINDOW_SECONDS / BASE_SECONDS + 2


def test_silence_for_a_minute_is_no_load() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    history.note_rank(load(5))
    clock.now += WINDOW_SECONDS + 1
    (window,) = history.window()
    assert window.decode.steps == 0
    assert not window.rows.any()
    assert history.latest() == [load(5)]


def test_rates_and_points_of_the_schedulers() -> None:
    clock = Clock()
    history = LoadHistory(clock)
    for second in range(POINTS + 20):
        stats = SchedulerStats(
            running=2,
            full_pages=10,
            full_pages_free=6,
            full_pages_cached=2,
            generated_tokens_total=30 * second,
            prompt_tokens_total=10 * second,
            prefix_queries_total=10 * second,
            prefix_hits_total=4 * second,
        )
        for _ in range(3):
            history.note_stats([stats, SchedulerStats(replica=1)])
        clock.now += 1
    assert len(history.points()) == POINTS
    assert history.points()[-1].kv_usage == pytest.approx(0.2)
    rates = history.rates()
    assert (rates.generated_tokens, rates.prompt_tokens) == (pytest.approx(30), pytest.approx(10))
    assert rates.prefix_hit_rate == pytest.approx(0.4)
    clock.now += 100
    assert history.rates().generated_tokens == 0


def test_experts_are_put_together_from_the_ranks_and_slices_count_once() -> None:
    history = LoadHistory(Clock())
    history.note_rank(load(1, decode=[[1, 3], [0, 0]]))
    history.note_rank(load(1, rank=1, decode=[[1, 3], [0, 0]], is_slice=True))
    history.note_rank(load(1, rank=2, first=2, decode=[[8, 0], [2, 2]]))
    windows = history.window()
    layers, rows = expert_rows(windows)
    assert layers == (0, 1)
    assert rows.tolist() == [[1, 3, 8, 0], [0, 0, 2, 2]]
    assert expert_imbalance(windows) == {0: pytest.approx(8 / 3), 1: 2.0}
    assert rank_rows(windows).tolist() == [[4, 0], [4, 0], [8, 4]]


def test_balancedness() -> None:
    assert balancedness(np.array([[4, 0, 6], [4, 0, 2]])) == pytest.approx((1 + 4 / 6) / 2)
    assert balancedness(np.zeros((2, 3), dtype=np.int64)) == 0.0
    assert balancedness(np.zeros((0, 0), dtype=np.int64)) == 0.0
