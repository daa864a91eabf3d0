"""Which runner is fastest for how many rows, by stored measurements. No torch here.

``measured_h200.json`` holds microseconds of one layer's experts by runner and routed rows, for each shape,
weight format and layout that was measured (``benchmarks/gpu_runners.py`` writes it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from interlock.moe.terms import Layout

TABLE = "measured_h200.json"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """E experts of one rank, of width i on hidden size h."""

    experts: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One shape's times: microseconds by runner and routed rows (ascending)."""

    shape: ExpertShape
    weight_format: str
    layout: Layout
    times: Mapping[str, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Pick:
    """The runner to take and why.

    Attributes:
        microseconds: an estimate; None where nothing was measured.
        compared: all that were asked for have measured times.
    """

    runner: str
    microseconds: float | None
    why: str
    compared: bool


@cache
def measurements() -> tuple[Measured, ...]:
    """The table in the package."""
    text = files("interlock.moe.experts").joinpath(TABLE).read_text(encoding="utf-8")
    return parse_measurements(json.loads(text))


def parse_measurements(document: Mapping[str, Any]) -> tuple[Measured, ...]:
    """Stored measurements, microseconds by runner and number of rows, rows ascending."""
    return tuple(
        Measured(
            ExpertShape(**entry["shape"]),
            entry["weight_format"],
            Layout(entry["layout"]),
            {
                runner: tuple(sorted((int(rows), float(time)) for rows, time in by_rows.items()))
                for runner, by_rows in entry["microseconds"].items()
            },
        )
        for entry in document["measured"]
    )


def best_runner(
    runners: Iterable[str],
    shape: ExpertShape,
    weight_format: str,
    layout: Layout,
    rows: int,
    *,
    table: Iterable[Measured] | None = None,
) -> Pick:
    """The fastest of ``runners`` for ``rows`` routed rows, by the nearest measured shape.

    Shapes are compared by the octaves between their sizes, rows by rows for each expert. Runners without a
    measurement lose to those with one; where there is none at all, the first of ``runners`` is taken.
    """
    names = list(runners)
    found = [
        entry
        for entry in (measurements() if table is None else table)
        if entry.weight_format == weight_format
        and entry.layout is layout
        and any(name in entry.times for name in names)
    ]
    if not found:
        return Pick(names[0], None, f"no {layout.value} {weight_format} rows were measured", False)
    near = min(found, key=lambda entry: _distance(entry.shape, shape))
    scaled = max(rows, 1) / shape.experts * near.shape.experts
    times = {name: _interpolated(near.times[name], scaled) for name in names if name in near.times}
    best = min(times, key=lambda name: times[name])
    others = ", ".join(f"{name} {time:.0f} us" for name, time in times.items() if name != best)
    why = f"{times[best]:.0f} us at {scaled / near.shape.experts:.3g} rows an expert"
    why += f", {others}" if others else ", the only one measured"
    return Pick(best, times[best], why, len(times) == len(names))


def _interpolated(points: tuple[tuple[int, float], ...], rows: float) -> float:
    """Time at ``rows`` between measured points, straight on logarithmic axes; flat beyond the ends."""
    before = [point for point in points if point[0] <= rows]
    after = [point for point in points if point[0] >= rows]
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (low, low_time), (high, high_time) = before[-1], after[0]
    if low == high:
        return low_time
    share = math.log(rows / low) / math.log(high / low)
    return math.exp(math.log(low_time) + share * (math.log(high_time) - math.log(low_time)))


def _distance(a: ExpertShape, b: ExpertShape) -> float:
    return (
        abs(math.log2(a.hidden_size / b.hidden_size))
        + abs(math.log2(a.intermediate_size / b.intermediate_size))
        + 0.25 * abs(math.log2(a.experts / b.experts))
    )
