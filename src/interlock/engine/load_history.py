"""The load of the last minutes, from the running sums that schedulers and ranks tell."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from interlock.engine.messages import PhaseLoad, RankLoad, SchedulerStats

POINT_SECONDS: Final = 1.0
POINTS: Final = 180
BASE_SECONDS: Final = 5.0
WINDOW_SECONDS: Final = 60.0

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Point:
    """All schedulers together at one moment of this machine's monotonic clock; token counts are sums."""

    at: float
    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    prefix_hits: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second, and the share of looked-up prompt tokens that the prefix cache had (0 without any)."""

    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    prefix_hit_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseWindow:
    """What one rank did in the counted steps of one phase in a window of time.

    rows int64 [layers, experts]; times in seconds, None without a timed call.
    """

    capacity: int
    steps: int
    tokens: int
    dispatch_seconds: float | None
    combine_seconds: float | None
    rows: Counts

    @property
    def capacity_use(self) -> float:
        """Mean share of T that was dispatched in a step."""
        return self.tokens / (self.steps * self.capacity) if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class RankWindow:
    """One rank in a window of time; ``latest`` has its running sums."""

    latest: RankLoad
    prefill: PhaseWindow
    decode: PhaseWindow

    @property
    def rows(self) -> Counts:
        """int64 [layers, experts] of both phases."""
        return self.prefill.rows + self.decode.rows


class LoadHistory:
    """Kept by the front end. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._latest: dict[int, RankLoad] = {}
        self._bases: dict[int, deque[tuple[float, RankLoad]]] = {}

    # ---- schedulers

    def note_stats(self, stats: Sequence[SchedulerStats]) -> None:
        """Called with every step; one point a second is kept."""
        now = self._clock()
        if not self._points or now - self._points[-1].at >= POINT_SECONDS:
            self._points.append(_point(now, stats))

    def points(self) -> list[Point]:
        """Oldest first, about one a second while schedulers speak."""
        return list(self._points)

    def rates(self, seconds: float = 10.0) -> Rates:
        """Means over the last ``seconds``; zero when the schedulers have been silent for so long."""
        since = self._clock() - seconds
        recent = [point for point in self._points if point.at >= since]
        if len(recent) < 2:
            return Rates()
        first, last = recent[0], recent[-1]
        span = last.at - first.at
        queries = last.prefix_queries - first.prefix_queries
        return Rates(
            prompt_tokens=(last.prompt_tokens - first.prompt_tokens) / span,
            generated_tokens=(last.generated_tokens - first.generated_tokens) / span,
            prefix_hit_rate=(last.prefix_hits - first.prefix_hits) / queries if queries else 0.0,
        )

    # ---- ranks

    def note_rank(self, load: RankLoad) -> None:
        now = self._clock()
        self._latest[load.rank] = load
        bases = self._bases.setdefault(load.rank, deque())
        if not bases or now - bases[-1][0] >= BASE_SECONDS:
            bases.append((now, load))
        while len(bases) > 1 and bases[1][0] <= now - WINDOW_SECONDS:
            bases.popleft()

    def latest(self) -> list[RankLoad]:
        """The last word of each rank that has spoken, by rank."""
        return [load for _, load in sorted(self._latest.items())]

    def window(self) -> list[RankWindow]:
        """What each rank did in the last minute (five seconds more at most), by rank."""
        return [self._rank_window(load) for load in self.latest()]

    def _rank_window(self, load: RankLoad) -> RankWindow:
        start = self._clock() - WINDOW_SECONDS
        older = [base for at, base in self._bases[load.rank] if at <= start]
        base = older[-1] if older else None
        shape = (len(load.layers), load.experts)
        return RankWindow(
            latest=load,
            prefill=_phase_window(load.prefill, base.prefill if base else None, shape),
            decode=_phase_window(load.decode, base.decode if base else None, shape),
        )


def rows_of(phase: PhaseLoad, shape: tuple[int, int]) -> Counts:
    """The rows of a report: int64 [layers, experts].

    Raises:
        ValueError: the report has another number of counts.
    """
    return np.frombuffer(phase.rows, dtype="<i8").reshape(shape)


def _phase_window(load: PhaseLoad, base: PhaseLoad | None, shape: tuple[int, int]) -> PhaseWindow:
    rows = rows_of(load, shape)
    return PhaseWindow(
        capacity=load.capacity,
        steps=load.steps - (base.steps if base else 0),
        tokens=load.tokens - (base.tokens if base else 0),
        dispatch_seconds=_mean(
            load.dispatch_seconds - (base.dispatch_seconds if base else 0.0),
            load.dispatch_calls - (base.dispatch_calls if base else 0),
        ),
        combine_seconds=_mean(
            load.combine_seconds - (base.combine_seconds if base else 0.0),
            load.combine_calls - (base.combine_calls if base else 0),
        ),
        rows=rows - rows_of(base, shape) if base else rows,
    )


def _mean(seconds: float, calls: int) -> float | None:
    return seconds / calls if calls else None


def _point(now: float, stats: Sequence[SchedulerStats]) -> Point:
    full = any(s.full_pages for s in stats)
    pages = sum(s.full_pages if full else s.window_pages for s in stats)
    free = sum(s.full_pages_free if full else s.window_pages_free for s in stats)
    cached = sum(s.full_pages_cached if full else s.window_pages_cached for s in stats)
    return Point(
        at=now,
        running=sum(s.running for s in stats),
        waiting=sum(s.waiting for s in stats),
        kv_usage=(pages - free - cached) / pages if pages else 0.0,
        prompt_tokens=sum(s.prompt_tokens_total for s in stats),
        generated_tokens=sum(s.generated_tokens_total for s in stats),
        prefix_queries=sum(s.prefix_queries_total for s in stats),
        prefix_hits=sum(s.prefix_hits_total for s in stats),
    )
