"""The few statistics that the figures are made of. Plain lists of floats; no unit is changed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float | None:
    """Value below which ``share`` (0 to 1) of ``values`` lie, linear between neighbours; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Figure:
    """Repetitions of one measurement: the median is the figure, least and most are its spread."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def most(self) -> float:
        return max(self.samples)

    def overlaps(self, other: Figure) -> bool:
        """Whether the spreads meet, so that the difference may be noise; of one sample none is known."""
        if len(self.samples) < 2 or len(other.samples) < 2:
            return True
        return self.least <= other.most and other.least <= self.most


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where one arm becomes the faster one and stays it.

    Attributes:
        batch: first measured batch from which ``faster`` wins at every larger one.
        interpolated: where the two lines meet, between that batch and the one before.
        clear: at every batch from ``batch`` on the spreads do not meet.
    """

    faster: str
    slower: str
    batch: int
    interpolated: float
    clear: bool


def crossover(
    first_name: str, first: Mapping[int, Figure], second_name: str, second: Mapping[int, Figure]
) -> Crossover | None:
    """Where the arm that loses at the smallest common batch begins to win for good; None if nowhere."""
    batches = sorted(first.keys() & second.keys())
    if len(batches) < 2:
        return None
    gaps = [first[batch].median - second[batch].median for batch in batches]
    sign = 1 if gaps[-1] > 0 else -1
    start = len(gaps)
    while start > 0 and gaps[start - 1] * sign > 0:
        start -= 1
    if start in (0, len(gaps)):
        return None
    before, after = gaps[start - 1], gaps[start]
    share = before / (before - after)
    faster, slower = (second_name, first_name) if sign > 0 else (first_name, second_name)
    return Crossover(
        faster=faster,
        slower=slower,
        batch=batches[start],
        interpolated=batches[start - 1] + share * (batches[start] - batches[start - 1]),
        clear=not any(first[batch].overlaps(second[batch]) for batch in batches[start:]),
    )


def growth(figures: Mapping[int, Figure]) -> float | None:
    """Figure at the largest batch divided by that at the smallest; None with fewer than two."""
    if len(figures) < 2:
        return None
    return figures[max(figures)].median / figures[min(figures)].median
