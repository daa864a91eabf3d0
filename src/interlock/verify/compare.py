"""How far two scorings of one text are apart, and what counts as rounding.

Where two ways of computing differ by rounding only, log-probabilities differ by a little, by more where the
token is unlikely, and the likeliest token changes only where two are nearly equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from interlock.engine.messages import TokenLogprob
from interlock.plan.launch_plan import LaunchPlan
from interlock.verify.arm import Scored

TOLERANCES = {"float32": 5e-4, "bfloat16": 0.125}
"""Largest difference of a log-probability that counts as rounding, by the coarser arm's dtype."""
UNKNOWN_DTYPE = "bfloat16"
FLIP_MARGIN = 0.05


class Outcome(StrEnum):
    """How two arms compare on one prompt, best first."""

    IDENTICAL = "bit-identical"
    ROUNDING = "within rounding"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Point:
    """One position that both arms scored.

    Attributes:
        difference: largest difference of a log-probability among the tokens that both report.
        kl: the control's expectation of the difference over those tokens (nats).
        flip_margin: how far apart the control sees both arms' likeliest tokens; 0 when they are the same.
        identical: everything reported is equal to the last bit.
    """

    position: int
    difference: float
    excess: float
    kl: float
    flip_margin: float
    identical: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All positions of one text that both arms scored."""

    points: tuple[Point, ...]
    outcome: Outcome

    @property
    def worst(self) -> Point | None:
        return max(self.points, key=lambda point: point.difference, default=None)

    @property
    def largest(self) -> float:
        return self.worst.difference if self.worst else 0.0

    @property
    def first_difference(self) -> int | None:
        """First position that is not identical."""
        return next((point.position for point in self.points if not point.identical), None)

    @property
    def mean_kl(self) -> float:
        return sum(point.kl for point in self.points) / len(self.points) if self.points else 0.0


def tolerance_of(control: LaunchPlan | None, candidate: LaunchPlan | None) -> float:
    """What counts as rounding between two plans; 0 where both promise the same bits."""
    if control is not None and candidate is not None and promises_same_bits(control, candidate):
        return 0.0
    dtypes = [plan.dtype if plan is not None else UNKNOWN_DTYPE for plan in (control, candidate)]
    dtypes += [plan.kv_cache_dtype for plan in (control, candidate) if plan is not None]
    return max(TOLERANCES.get(dtype, TOLERANCES[UNKNOWN_DTYPE]) for dtype in dtypes)


def promises_same_bits(control: LaunchPlan, candidate: LaunchPlan) -> bool:
    """Both are deterministic and compute in the same dtype with the same kernels."""
    same = ["dtype", "kv_cache_dtype", "kernels", "attention_backend", "device", "sliding_window_extra"]
    same += ["moe_runner_backend"]
    return (
        control.deterministic
        and candidate.deterministic
        and all(getattr(control, item) == getattr(candidate, item) for item in same)
    )


def compare(control: Scored, candidate: Scored, tolerance: float) -> Comparison:
    """Compare two scorings of the same text.

    Raises:
        ValueError: the texts differ.
    """
    if control.token_ids != candidate.token_ids:
        raise ValueError("the arms scored different texts")
    points = tuple(
        compare_position(position, ours, theirs)
        for position, (ours, theirs) in enumerate(zip(control.entries, candidate.entries, strict=True))
        if ours is not None and theirs is not None
    )
    return Comparison(points, outcome_of(points, tolerance))


def outcome_of(points: Sequence[Point], tolerance: float) -> Outcome:
    """A position is within rounding when no log-probability is off by more than the tolerance (more for
    unlikely tokens) and the likeliest token changes only at a near tie."""
    if all(point.identical for point in points):
        return Outcome.IDENTICAL
    margin = max(FLIP_MARGIN, 2 * tolerance) if tolerance else 0.0
    within = all(point.excess <= tolerance and point.flip_margin <= margin for point in points)
    return Outcome.ROUNDING if within and tolerance else Outcome.DIFFERENT


def compare_position(position: int, control: TokenLogprob, candidate: TokenLogprob) -> Point:
    """How far apart two engines' log-probabilities of one position are, over the tokens that both report."""
    ours, theirs = _known(control), _known(candidate)
    shared = ours.keys() & theirs.keys()
    differences = {token: _difference(ours[token], theirs[token]) for token in shared}
    return Point(
        position=position,
        difference=max(differences.values(), default=math.inf),
        excess=max((d / (1 + abs(ours[t]) / 10) for t, d in differences.items()), default=math.inf),
        kl=sum(math.exp(ours[t]) * (ours[t] - theirs[t]) for t in shared if ours[t] > -math.inf < theirs[t]),
        flip_margin=_flip_margin(ours, theirs),
        identical=ours == theirs,
    )


def agree(control: Sequence[float], candidate: Sequence[float], margin: float = FLIP_MARGIN) -> bool:
    """Whether two rows of logits prefer the same token, excusing a near tie in the control's eyes."""
    first = max(range(len(control)), key=control.__getitem__)
    other = max(range(len(candidate)), key=candidate.__getitem__)
    return control[first] - control[other] <= margin


def _known(entry: TokenLogprob) -> dict[int, float]:
    return {**dict(entry.top), entry.token_id: entry.logprob}


def _difference(ours: float, theirs: float) -> float:
    return 0.0 if ours == theirs else abs(ours - theirs)


def _flip_margin(ours: dict[int, float], theirs: dict[int, float]) -> float:
    first, other = max(ours, key=ours.__getitem__), max(theirs, key=theirs.__getitem__)
    if first == other:
        return 0.0
    known = ours[other] if other in ours else min(ours.values())
    return ours[first] - known
