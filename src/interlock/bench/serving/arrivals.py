"""When requests are due. Open loop: at times that do not depend on the server. Closed loop: when one ends."""

from __future__ import annotations

import random
from dataclasses import dataclass

from interlock.errors import Refusal


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How load is offered.

    Attributes:
        kind: "poisson", "fixed" (both open loop) or "closed".
        rate: requests a second, open loop.
        concurrency: requests in flight at once, closed loop.
    """

    kind: str
    rate: float = 0.0
    concurrency: int = 0

    @property
    def is_open(self) -> bool:
        return self.kind != "closed"

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which each request of an open loop is due."""
        if self.kind == "fixed":
            return [index / self.rate for index in range(count)]
        rng, now, due = random.Random(seed), 0.0, []
        for _ in range(count):
            due.append(now)
            now += rng.expovariate(self.rate)
        return due


def arrivals_of(kind: str, rate: float | None, concurrency: int | None) -> Arrivals:
    """Arrivals from the command line.

    Raises:
        Refusal: none or both of rate and concurrency, or values that mean nothing.
    """
    if (rate is None) == (concurrency is None):
        raise Refusal(
            option="--rate",
            given="" if rate is None else rate,
            rule="give either a rate (open loop) or a concurrency (closed loop)",
            alternatives=("--rate 2", "--concurrency 8"),
        )
    if concurrency is not None:
        if concurrency < 1:
            raise Refusal(option="--concurrency", given=concurrency, rule="must be at least 1")
        return Arrivals("closed", concurrency=concurrency)
    assert rate is not None
    if rate <= 0:
        raise Refusal(option="--rate", given=rate, rule="must be above 0 requests a second")
    if kind not in ("poisson", "fixed"):
        raise Refusal(
            option="--arrivals",
            given=kind,
            rule="is not a way for requests to arrive",
            alternatives=("--arrivals poisson", "--arrivals fixed"),
        )
    return Arrivals(kind, rate=rate)
