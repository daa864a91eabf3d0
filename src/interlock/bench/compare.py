"""Compare two runs: only what was matched, and otherwise the name of every difference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from interlock.bench.record import DELIVERED, MATCHED
from interlock.errors import Refusal
from interlock.evidence.record import rehearsal_notes, said_rehearsals
from interlock.evidence.schema import Arm, Evidence, Measurement, Scalar, arm_plan

NOT_COMPARED: Final = frozenset(
    {
        "model", "model_path", "served_model_name", "host", "port", "api_key_set", "log_level", "provenance",
        "memory", "dist_init", "node_rank", "card", "stall_timeout", "moe_buffer_bytes",
    }
)  # fmt: skip
"""Plan items that do not change what is measured, or that follow from others."""
MAX_FAILURES: Final = 0.01
MAX_HIT_DIFFERENCE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that was not the same on both sides. ``item`` is what ``--allow`` takes."""

    item: str
    first: object
    second: object

    def __str__(self) -> str:
        return f"{self.item}: {self.first} against {self.second}"


@dataclass(frozen=True, slots=True)
class Pair:
    """One measurement of both sides."""

    first: Measurement
    second: Measurement

    @property
    def ratio(self) -> float:
        """Second over first."""
        return self.second.value / self.first.value if self.first.value else float("nan")

    @property
    def is_clear(self) -> bool | None:
        """Whether the spreads do not meet; None where there are not several samples on both sides."""
        mine, theirs = self.first.samples, self.second.samples
        if len(mine) < 2 or len(theirs) < 2:
            return None
        return max(mine) < min(theirs) or max(theirs) < min(mine)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs that may be compared, the differences that were allowed, and what only one side has."""

    pairs: tuple[Pair, ...]
    allowed: tuple[Difference, ...]
    unpaired: tuple[str, ...]


def compare(
    first: Evidence,
    second: Evidence,
    *,
    first_arm: str | None = None,
    second_arm: str | None = None,
    allow: Collection[str] = (),
) -> Comparison:
    """Compare one arm of ``first`` with one of ``second``.

    Args:
        first_arm, second_arm: names; may be left out when a file has one arm.
        allow: differences that are the subject of the comparison.

    Raises:
        Refusal: a difference that is not allowed (all are named), or nothing in common.
    """
    mine, theirs = pick_arms(first, first_arm), pick_arms(second, second_arm)
    _refuse_rehearsals(
        [*said_rehearsals(first), *said_rehearsals(second), *rehearsal_notes([*mine, *theirs])]
    )
    differences = [*_runs(first, second), *_plans(mine, theirs)]
    pairs, unpaired = _pair(first, {arm.name for arm in mine}, second, {arm.name for arm in theirs})
    differences += _unmatched(pairs)
    found = tuple(dict.fromkeys(differences))
    refused = [each for each in found if each.item not in allow]
    if refused:
        names = " ".join(f"--allow {name}" for name in dict.fromkeys(each.item for each in refused))
        raise Refusal(
            option="bench compare",
            given="",
            rule="the arms are not matched: " + "; ".join(map(str, refused)),
            alternatives=(f"run both with the same settings, or if this is what you compare: {names}",),
        )
    if not pairs:
        raise Refusal(
            option="bench compare",
            given="",
            rule="the two runs measured nothing in common: " + "; ".join(unpaired[:6]),
            alternatives=("run both with the same verb and the same points",),
        )
    return Comparison(tuple(pairs), tuple(each for each in found if each.item in allow), tuple(unpaired))


def _refuse_rehearsals(notices: Sequence[str]) -> None:
    for notice in notices:
        raise Refusal(
            option="bench compare",
            given="",
            rule=f"a run was a {notice}, so there is nothing to compare",
            alternatives=("measure with one GPU for each rank (--ranks-per-gpu 1)",),
        )


def pick_arms(evidence: Evidence, name: str | None) -> list[Arm]:
    """The arms of one side: those called ``name`` (or ``name@chunk``), or all when the run had one."""
    stems = list(dict.fromkeys(arm.name.partition("@")[0] for arm in evidence.arms))
    if name is None and len(stems) == 1:
        return list(evidence.arms)
    chosen = [arm for arm in evidence.arms if name in (arm.name, arm.name.partition("@")[0])]
    if not chosen:
        raise Refusal(
            option="--arms",
            given=name or "",
            rule=f"the run has the arms {', '.join(stems)}; say which one is compared",
            alternatives=(f"--arms {stems[0]},{stems[0]}",),
        )
    return chosen


def plan_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    """Items in effect that differ between two plans."""
    for item in sorted(first.keys() | second.keys()):
        if item not in NOT_COMPARED and first.get(item) != second.get(item):
            yield Difference(item, first.get(item), second.get(item))


def _runs(first: Evidence, second: Evidence) -> Iterator[Difference]:
    """Model, machine and package versions. Versions of Interlock itself are what is often compared."""
    for name in ("config_hash", "weight_format", "name"):
        mine, theirs = getattr(first.model, name), getattr(second.model, name)
        if mine != theirs:
            yield Difference(f"model.{name}", mine, theirs)
    for name in ("key", "name", "cores"):
        mine, theirs = getattr(first.device, name), getattr(second.device, name)
        if mine != theirs:
            yield Difference(f"device.{name}", mine, theirs)
    for package in sorted(first.packages.keys() | second.packages.keys()):
        mine, theirs = first.packages.get(package), second.packages.get(package)
        if mine != theirs:
            yield Difference(f"package.{package}", mine, theirs)
    for evidence, place in ((first, "first"), (second, "second")):
        if evidence.verdict == "invalid":
            yield Difference("verdict", f"the {place} run is invalid", "; ".join(evidence.notes[:3]))


def _plans(first: list[Arm], second: list[Arm]) -> Iterator[Difference]:
    by_chunk = {arm.name.partition("@")[2]: arm for arm in second}
    for arm in first:
        other = by_chunk.get(arm.name.partition("@")[2])
        if other is None:
            continue
        if (arm.plan is None) != (other.plan is None):
            yield Difference("plan", _shown(arm), _shown(other))
        elif arm.plan is not None:
            yield from plan_differences(arm_plan(arm), arm_plan(other))


def _shown(arm: Arm) -> str:
    return f"{arm.name} shows {'no plan' if arm.plan is None else 'its plan'}"


def _pair(
    first: Evidence, first_arms: set[str], second: Evidence, second_arms: set[str]
) -> tuple[list[Pair], list[str]]:
    mine = {_key(m): m for m in first.measurements if m.arm in first_arms}
    theirs = {_key(m): m for m in second.measurements if m.arm in second_arms}
    pairs = [Pair(mine[key], theirs[key]) for key in mine if key in theirs]
    alone = [f"only the first has {_spoken(key)}" for key in mine if key not in theirs]
    alone += [f"only the second has {_spoken(key)}" for key in theirs if key not in mine]
    return pairs, alone


Key = tuple[str, tuple[tuple[str, Scalar], ...]]


def _key(measurement: Measurement) -> Key:
    conditions = measurement.conditions
    return measurement.name, tuple((name, conditions[name]) for name in MATCHED if name in conditions)


def _spoken(key: Key) -> str:
    name, conditions = key
    values = ", ".join(
        f"{item} {value}" for item, value in conditions if item != "tool" and value is not None
    )
    return f"{name} ({values})" if values else name


def _unmatched(pairs: list[Pair]) -> Iterator[Difference]:
    for pair in pairs:
        mine, theirs = pair.first.conditions, pair.second.conditions
        for name in DELIVERED:
            if mine.get(name) != theirs.get(name):
                yield Difference(name, mine.get(name), theirs.get(name))
        hits = (_number(mine.get("hit_rate")), _number(theirs.get("hit_rate")))
        if abs(hits[0] - hits[1]) > MAX_HIT_DIFFERENCE:
            yield Difference("hit_rate", f"{hits[0]:.1%}", f"{hits[1]:.1%}")
        for conditions, other in ((mine, theirs), (theirs, mine)):
            if _number(conditions.get("failure_rate")) > MAX_FAILURES:
                shares = (_number(conditions.get("failure_rate")), _number(other.get("failure_rate")))
                yield Difference("failure_rate", f"{shares[0]:.1%}", f"{shares[1]:.1%} (at most 1% compares)")


def _number(value: Scalar) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
