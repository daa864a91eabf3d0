"""Which rank failed first: the verdict over failure reports, dead processes and silent ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from interlock.engine.messages import Heartbeat, RankFailed

SILENCE_SECONDS = 5.0
PEER_SILENCE_SECONDS = 2.5
ABSENCE_SECONDS = 1.0
"""A watcher that looks less often than this was stopped or starved itself."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A rank process that ended: its exit code, negative for a signal."""

    rank: int
    code: int

    def describe(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} ended with exit code {self.code} before it was told to"


@dataclass(slots=True)
class Verdict:
    """Collects what is known about failing ranks and names the one that failed first."""

    failures: list[RankFailed] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)

    @property
    def has_evidence(self) -> bool:
        return bool(self.failures or self.exits or self.stalls)

    @property
    def has_cause(self) -> bool:
        """Whether something is known that is more than the consequence of another rank's end."""
        reported = {failure.rank for failure in self.failures}
        return bool(
            self.stalls
            or any(not failure.is_consequence for failure in self.failures)
            or any(exit.rank not in reported for exit in self.exits)
        )

    def first_error(self) -> str:
        """One line a cause, the first cause on top; consequences of another rank's end come last."""
        reported = {failure.rank for failure in self.failures}
        causes = [f"rank {f.rank}: {f.error}" for f in self.failures if not f.is_consequence]
        silent_deaths = [e.describe() for e in self.exits if e.rank not in reported]
        consequences = [f"rank {f.rank}: {f.error}" for f in self.failures if f.is_consequence]
        killed = [line for line in silent_deaths if "killed" in line]
        ended = [line for line in silent_deaths if "killed" not in line]
        return "\n".join(killed + causes + self.stalls + ended + consequences)


class Pulse:
    """The last sign of life of each rank, and which of them stall.

    It is looked at several times a second. What passes while nobody looks, since this process was suspended
    or starved, is no rank's silence: signs of life wait unread.

    Args:
        timeout: seconds without progress after which a rank that has something to do counts as stalled.
        now: a monotonic clock.
    """

    def __init__(self, ranks: range, timeout: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._now = now
        self._looked = now()
        self._seen = dict.fromkeys(ranks, self._looked)
        self._last: dict[int, Heartbeat] = {}

    def note(self, beat: Heartbeat) -> None:
        if beat.rank not in self._seen:
            return
        self._seen[beat.rank] = self._now()
        self._last[beat.rank] = beat

    def forget(self, rank: int) -> None:
        """``rank`` has told its end, after which it is silent for good."""
        self._seen.pop(rank, None)
        self._last.pop(rank, None)

    def silent(self, limit: float) -> list[str]:
        """One line for each rank whose last sign of life is more than ``limit`` seconds old."""
        now = self._look()
        return [
            f"rank {rank} has been silent for {now - seen:.0f} s (limit {limit:.0f} s)"
            for rank, seen in self._seen.items()
            if rank in self._last and now - seen > limit
        ]

    def stalled(self) -> list[str]:
        """One line for each stalled rank: silent, or busy with one thing for too long.

        Ranks that merely wait for others are named only when no rank is the reason for the wait. A busy
        rank may hang in an exchange with a silent one, which is then the reason, though silent for less long.
        """
        self._look()
        busy = [b for b in self._last.values() if self._is_stuck(b)]
        computing = [b for b in busy if b.activity != "waiting for ranks"]
        stuck = [
            f"rank {b.rank} has been {b.activity} for {b.activity_seconds:.0f} s "
            f"without progress (limit {self._timeout:.0f} s)"
            for b in computing or busy
        ]
        if not stuck:
            return self.silent(max(self._timeout, SILENCE_SECONDS))
        return self.silent(PEER_SILENCE_SECONDS) or stuck

    def _look(self) -> float:
        """The time; forgives the ranks an absence of the watcher."""
        now = self._now()
        absence, self._looked = now - self._looked, now
        if absence > ABSENCE_SECONDS:
            self._seen = {rank: seen + absence for rank, seen in self._seen.items()}
        return now

    def _is_stuck(self, beat: Heartbeat) -> bool:
        return beat.activity not in ("idle", "loading") and beat.activity_seconds > self._timeout
