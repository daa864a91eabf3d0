"""Where the time of a start went, as a rank tells it: in its log and, as "start", among its receipts."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartClock:
    """Cuts the time since ``begun`` into named spans, each from the end of the one before.

    Args:
        begun: seconds of this machine's monotonic clock; by default now.
        now: the clock.
    """

    def __init__(self, begun: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = self._last = now() if begun is None else begun
        self._spans: dict[str, float] = {}
        self._details: dict[str, object] = {}

    def mark(self, span: str) -> None:
        """``span`` ends now. A name that was used before gets the seconds of both."""
        now = self._now()
        self._spans[span] = self._spans.get(span, 0.0) + now - self._last
        self._last = now

    def tell(self, **details: object) -> None:
        """Add what else is worth knowing of the start."""
        self._details |= details

    def report(self) -> dict[str, object]:
        """Seconds of each span in order, of all of them, and the details."""
        spans = {name: round(seconds, 2) for name, seconds in self._spans.items()}
        return {"spans": spans, "seconds": round(self._last - self._begun, 2), **self._details}

    def __str__(self) -> str:
        spans = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._spans.items())
        return f"started in {self._last - self._begun:.1f} s: {spans}"
