"""Where two traces part: walks through the layers in the order of computation and names the first cause.

A position is *tainted* once a cause was found for it; what it computes afterwards, and what later positions
compute from it through attention, follows from that cause. Untainted positions may differ by rounding only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from interlock.verify.trace import LayerRoutes, Trace

MIXED = "float32 and bfloat16"
SCORES, LOGITS = "scores", "logits, relative to the largest that there can be"
ROUNDING = {"float32": 2e-4, "bfloat16": 0.02, MIXED: 0.05}
"""Relative difference of a layer's output (to the row's largest entry) that counts as rounding in the first
layer, by the precision of both arms; it may grow with the square root of the depth, as random errors do."""
SCORE_ROUNDING = {"float32": 1e-4, "bfloat16": 0.02, MIXED: 0.05}
"""The same for the router's scores, absolute."""


class Origin(StrEnum):
    """What kind of first cause was found."""

    NONE = "identical"
    ROUNDING = "rounding"
    FLIP = "routing flip"
    ATTENTION = "attention"
    DENSE = "dense mlp"
    CHOICE = "routing choice"
    WEIGHTS = "routing weights"
    EXPERTS = "experts"
    HEAD = "embedding, final norm or head"


@dataclass(frozen=True, slots=True)
class Flip:
    """A token whose choice of experts differs at a near tie.

    Attributes:
        left, joined: experts that only the control, only the candidate chose.
        gap: by how much the control preferred the former, in ``unit``.
    """

    layer: int
    position: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    gap: float
    unit: str = SCORES


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """Largest relative differences of one layer, for the report."""

    layer: int
    attention: float
    mlp: float
    same_routes: float | None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The first cause.

    Attributes:
        origin: what differs first; ``ROUNDING`` when nothing is beyond rounding.
        layer, position, size: where, and how large the relative difference is there.
        flips: choices that differ at near ties, in the order of computation.
        layers: differences by layer.
    """

    origin: Origin
    layer: int | None = None
    position: int | None = None
    size: float = 0.0
    details: str = ""
    flips: tuple[Flip, ...] = ()
    layers: tuple[LayerDifference, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Something is off that rounding does not explain."""
        return self.origin not in (Origin.NONE, Origin.ROUNDING, Origin.FLIP)


@dataclass(slots=True)
class _Walk:
    """State of one walk through the layers."""

    control: Trace
    candidate: Trace
    precision: str
    tainted: torch.Tensor
    flips: list[Flip] = field(default_factory=list)
    first_rounding: tuple[str, int, int, float] | None = None

    def relative(self, layer: int, part: str) -> torch.Tensor:
        """Relative difference [p] of a part's output."""
        ours, theirs = (t.outputs[layer, part].double() for t in (self.control, self.candidate))
        scale = ours.abs().amax(-1).clamp_min(1e-30)
        return torch.nan_to_num((ours - theirs).abs().amax(-1) / scale, nan=torch.inf)

    def beyond(self, layer: int, part: str, label: str) -> tuple[int, float] | None:
        """First untainted row whose output differs by more than rounding, and by how much."""
        relative = self.relative(layer, part)
        untainted = relative.masked_fill(self.tainted, 0.0)
        if self.first_rounding is None and bool((untainted > 0).any()):
            row = int((untainted > 0).nonzero()[0])
            self.first_rounding = (label, layer, row, float(untainted[row]))
        rows = (untainted > ROUNDING[self.precision] * _growth(layer)).nonzero()
        return (int(rows[0]), float(untainted[rows[0]])) if len(rows) else None

    def taint_later(self) -> None:
        """Attention carries what a tainted position computed to all later ones."""
        self.tainted = self.tainted.cumsum(0) > 0


def precision_of(*dtypes: str) -> str:
    """Key of ``ROUNDING`` for the dtypes that two arms compute and cache in."""
    distinct = {dtype if dtype in ROUNDING else "bfloat16" for dtype in dtypes}
    return distinct.pop() if len(distinct) == 1 else MIXED


def _growth(layer: int) -> float:
    return math.sqrt(1 + layer)


def attribute(control: Trace, candidate: Trace, precision: str) -> Attribution:
    """The first cause that two traces of the same positions show; ``precision`` from ``precision_of``.

    Raises:
        ValueError: the traces are of different positions or layers.
    """
    if not torch.equal(control.positions, candidate.positions) or control.layers != candidate.layers:
        raise ValueError("the traces are not of the same positions")
    walk = _Walk(control, candidate, precision, torch.zeros(len(control.positions), dtype=torch.bool))
    layers = tuple(_difference(walk, layer) for layer in control.layers)
    found = None
    for layer in control.layers:
        found = _attention(walk, layer) or _mlp(walk, layer)
        if found is not None:
            break
    if found is None:
        found = _nothing_beyond_rounding(walk)
    return Attribution(
        origin=found.origin,
        layer=found.layer,
        position=found.position,
        size=found.size,
        details=found.details,
        flips=tuple(walk.flips),
        layers=layers,
    )


def _attention(walk: _Walk, layer: int) -> Attribution | None:
    walk.taint_later()
    return _fault(walk, layer, "attention", Origin.ATTENTION)


def _mlp(walk: _Walk, layer: int) -> Attribution | None:
    if layer not in walk.control.routes:
        return _fault(walk, layer, "mlp", Origin.DENSE)
    ours, theirs = walk.control.routes[layer], walk.candidate.routes[layer]
    found = _choices(walk, layer, ours, theirs) or _weights(walk, layer, ours, theirs)
    return found or _fault(walk, layer, "mlp", Origin.EXPERTS)


def _fault(walk: _Walk, layer: int, part: str, origin: Origin) -> Attribution | None:
    beyond = walk.beyond(layer, part, str(origin))
    if beyond is None:
        return None
    row, size = beyond
    return Attribution(origin, layer, int(walk.control.positions[row]), size)


def _choices(walk: _Walk, layer: int, ours: LayerRoutes, theirs: LayerRoutes) -> Attribution | None:
    """Excuse choices that differ at a near tie (both routers score alike); report the first other one.

    Steep routers saturate: their scores are 0 or 1 although the logits hardly differ, so logits count too.
    """
    differs = (ours.ids != theirs.ids).any(-1) & ~walk.tainted
    limit = SCORE_ROUNDING[walk.precision] * _growth(layer)
    width = walk.control.outputs[layer, "attention"].shape[1]
    for row in differs.nonzero().flatten().tolist():
        before, after = (set(routes.ids[row].tolist()) - {-1} for routes in (ours, theirs))
        left, joined = tuple(sorted(before - after)), tuple(sorted(after - before))
        position = int(walk.control.positions[row])
        reach = ours.reach[row].clamp_min(1e-30)
        views = (
            (SCORES, ours.choice[row], theirs.choice[row], limit),
            (LOGITS, ours.logits[row] / reach, theirs.logits[row] / reach, 4 * limit / math.sqrt(width)),
        )
        tie = next(filter(None, (_tie(*view, left, joined) for view in views)), None)
        if tie is None:
            apart = float((ours.choice[row] - theirs.choice[row]).abs().max())
            text = f"experts {sorted(before)} against {sorted(after)}, router scores {apart:.1e} apart"
            return Attribution(Origin.CHOICE, layer, position, apart, text)
        walk.flips.append(Flip(layer, position, left, joined, *tie))
        walk.tainted[row] = True
    return None


def _tie(
    unit: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    limit: float,
    left: tuple[int, ...],
    joined: tuple[int, ...],
) -> tuple[float, str] | None:
    """(gap, unit) when both routers see the same within ``limit`` and the control sees a near tie."""
    if not left or not joined or float((ours - theirs).abs().max()) > limit:
        return None
    gap = float(ours[list(left)].max() - ours[list(joined)].min())
    return (gap, unit) if gap <= 2 * limit else None


def _weights(walk: _Walk, layer: int, ours: LayerRoutes, theirs: LayerRoutes) -> Attribution | None:
    apart = (ours.weights - theirs.weights).abs().amax(-1).masked_fill(walk.tainted, 0.0)
    scale = ours.weights.abs().amax(-1).clamp_min(1e-30)
    rows = (apart / scale > ROUNDING[walk.precision] * _growth(layer)).nonzero()
    if not len(rows):
        return None
    row = int(rows[0])
    sums = [float(routes.weights[row].sum()) for routes in (ours, theirs)]
    text = f"the same experts with other weights, which sum to {sums[0]:.6g} against {sums[1]:.6g}"
    return Attribution(
        Origin.WEIGHTS, layer, int(walk.control.positions[row]), float((apart / scale)[row]), text
    )


def _nothing_beyond_rounding(walk: _Walk) -> Attribution:
    if walk.flips:
        first = walk.flips[0]
        return Attribution(Origin.FLIP, first.layer, first.position, first.gap)
    if walk.first_rounding is None:
        return Attribution(Origin.NONE)
    label, layer, row, size = walk.first_rounding
    return Attribution(Origin.ROUNDING, layer, int(walk.control.positions[row]), size, label)


def _difference(walk: _Walk, layer: int) -> LayerDifference:
    same = None
    if layer in walk.control.routes:
        ids = (t.routes[layer].ids for t in (walk.control, walk.candidate))
        same = float(torch.eq(*ids).all(-1).double().mean())
    attention, mlp = (float(walk.relative(layer, part).max()) for part in ("attention", "mlp"))
    return LayerDifference(layer, attention, mlp, same)
