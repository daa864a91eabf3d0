"""Figures of a run of ``bench serve``. Percentiles are of completed requests only, and say so by name.

Rates are over the wall time from when the first request was due to the end of the last answer:
``input_tokens_submitted_per_second`` counts prompts, ``input_tokens_computed_per_second`` without what the
server found in its prefix cache, ``output_tokens_per_second`` what was received.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlock.bench.serving.exchange import Exchange
from interlock.bench.statistics import percentile

SHARES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class Limits:
    """A request is good when it completed within all limits that are given, in seconds."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.latency))

    def met_by(self, exchange: Exchange) -> bool:
        pairs = (
            (self.ttft, exchange.ttft),
            (self.tpot, exchange.tpot),
            (self.latency, exchange.latency),
        )
        if exchange.status != "completed" or exchange.ttft is None:
            return False
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class ServeFigures:
    """Figures of one run; None where there is nothing to count.

    Attributes:
        times: "ttft", "tpot", "itl", "latency" -> "p50", "p90", "p99" -> seconds.
        rates: by name, a second.
        short: completed requests that brought fewer tokens than asked.
        lateness_p99, lateness_most: how late this client sent, in seconds.
        hit_rate: cached over submitted prompt tokens; None where the server does not tell.
        good: completed requests within the limits; None without limits.
    """

    completed: int
    failed: int
    incomplete: int
    wall: float
    times: dict[str, dict[str, float | None]]
    rates: dict[str, float | None]
    mean_output_tokens: float | None
    mean_prompt_tokens: float | None
    short: int
    lateness_p99: float | None
    lateness_most: float | None
    hit_rate: float | None
    good: int | None
    errors: tuple[str, ...]

    @property
    def offered(self) -> int:
        return self.completed + self.failed + self.incomplete

    @property
    def failure_rate(self) -> float:
        """Failed and incomplete requests over all."""
        return (self.failed + self.incomplete) / self.offered if self.offered else 0.0


def figures_of(exchanges: Sequence[Exchange], limits: Limits) -> ServeFigures:
    """Reduce what happened to figures."""
    completed = [each for each in exchanges if each.status == "completed"]
    wall = max(e.ended for e in exchanges) - min(e.due for e in exchanges) if exchanges else 0.0
    good = sum(limits.met_by(each) for each in exchanges) if limits.given else None
    lateness = [each.lateness for each in exchanges if each.sent]
    errors: dict[str, int] = {}
    for each in exchanges:
        if each.error:
            errors[each.error] = errors.get(each.error, 0) + 1
    return ServeFigures(
        completed=len(completed),
        failed=sum(each.status == "failed" for each in exchanges),
        incomplete=sum(each.status == "incomplete" for each in exchanges),
        wall=wall,
        times={
            "ttft": _percentiles(each.ttft for each in completed),
            "tpot": _percentiles(each.tpot for each in completed),
            "itl": _percentiles(gap for each in completed for gap in each.gaps),
            "latency": _percentiles(each.latency for each in completed),
        },
        rates=_rates(exchanges, completed, good, wall),
        mean_output_tokens=_mean([each.output_tokens for each in completed]),
        mean_prompt_tokens=_mean([e.prompt_tokens for e in completed if e.prompt_tokens is not None]),
        short=sum(each.output_tokens < each.asked_tokens for each in completed),
        lateness_p99=percentile(lateness, 0.99),
        lateness_most=max(lateness, default=None),
        hit_rate=_hit_rate(completed),
        good=good,
        errors=tuple(f"{count} x {text}" for text, count in sorted(errors.items(), key=lambda i: -i[1])),
    )


def _rates(
    exchanges: Sequence[Exchange], completed: Sequence[Exchange], good: int | None, wall: float
) -> dict[str, float | None]:
    def rate(count: float | None) -> float | None:
        return None if count is None or wall <= 0 else count / wall

    prompts = [each.prompt_tokens for each in completed]
    cached = [each.cached_tokens for each in completed]
    submitted = sum(p for p in prompts if p is not None) if None not in prompts else None
    computed = None
    if submitted is not None and None not in cached:
        computed = submitted - sum(c for c in cached if c is not None)
    return {
        "requests_completed_per_second": rate(len(completed)),
        "goodput_requests_per_second": rate(good),
        "input_tokens_submitted_per_second": rate(submitted),
        "input_tokens_computed_per_second": rate(computed),
        "output_tokens_per_second": rate(sum(each.output_tokens for each in exchanges)),
    }


def _hit_rate(completed: Sequence[Exchange]) -> float | None:
    known = [(e.cached_tokens, e.prompt_tokens) for e in completed if e.prompt_tokens]
    if not known or any(cached is None for cached, _ in known):
        return None
    return sum(cached or 0 for cached, _ in known) / sum(prompt or 0 for _, prompt in known)


def _percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    present = [value for value in values if value is not None]
    return {name: percentile(present, share) for share, name in SHARES}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
