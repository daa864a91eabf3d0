"""Whether an evidence file is whole and agrees with itself: plan, receipts, options, numbers, verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_origin

import msgspec

from interlock.errors import InterlockError
from interlock.evidence.schema import Arm, Evidence, digest_of
from interlock.option_text import options_of
from interlock.options import OPTIONS
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.receipts import check


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """A plan as it was recorded, perhaps by a version that had other items.

    Attributes:
        missing: items of today that the record does not have; ``plan`` holds neutral values for them.
    """

    plan: LaunchPlan
    missing: frozenset[str]


def problems(evidence: Evidence) -> list[str]:
    """Why ``evidence`` must not be believed; [] when nothing speaks against it."""
    found = []
    if evidence.digest != digest_of(evidence):
        found.append("the digest does not match the content: the file was changed after it was written")
    if not evidence.arms or (evidence.kind == "verify" and evidence.arms[-1].plan is None):
        return [*found, "it holds no plan of the engine that it is about"]
    if evidence.kind == "verify" and len(evidence.arms) != 2:
        found.append(f"a comparison has two arms, this one has {len(evidence.arms)}")
    for arm in evidence.arms:
        if arm.plan is not None:
            found += [f"{arm.name}: {text}" for text in _arm_problems(evidence, arm)]
    found += _verdict_problems(evidence)
    names = {arm.name for arm in evidence.arms}
    found += [
        f"{number.name} is of an arm {number.arm!r}, which is not recorded"
        for number in evidence.measurements
        if number.arm not in names
    ]
    return found


def recorded_plan(raw: dict[str, Any]) -> RecordedPlan:
    """Read a recorded plan; items that were added since are filled with neutral values.

    Raises:
        InterlockError: not a launch plan.
    """
    fields = msgspec.structs.fields(LaunchPlan)
    missing = frozenset(field.name for field in fields if field.name not in raw)
    neutral = {field.name: _neutral(field.type) for field in fields if field.name in missing}
    try:
        return RecordedPlan(msgspec.convert({**neutral, **raw}, LaunchPlan), missing)
    except msgspec.ValidationError as error:
        raise InterlockError(f"its plan cannot be read: {error}") from None


def _neutral(kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return ()
    return {str: "", int: 0, bool: False, float: 0.0}.get(kind)


def _arm_problems(evidence: Evidence, arm: Arm) -> Iterator[str]:
    try:
        recorded = recorded_plan(arm.plan or {})
    except InterlockError as error:
        yield str(error)
        return
    plan, card = recorded.plan, recorded.plan.card
    for name, told, planned in (
        ("model family", evidence.model.family, card.family),
        ("config hash", evidence.model.config_hash, card.config_hash),
        ("weight format", evidence.model.weight_format, card.weight_format),
        ("device", evidence.device.kind, plan.device),
    ):
        if told != planned:
            yield f"the file says {name} {told!r}, its own plan {planned!r}"
    receipts = {int(rank): items for rank, items in arm.receipts.items() if rank.isdecimal()}
    for mismatch in check(plan, receipts):
        if mismatch.item not in recorded.missing:
            yield f"its own receipts contradict its plan: {mismatch}"
            break
    yield from _option_problems(arm, plan, recorded.missing)


def _option_problems(arm: Arm, plan: LaunchPlan, missing: frozenset[str]) -> Iterator[str]:
    """Options that were asked for and are not what the plan holds."""
    try:
        options = options_of(arm.options, arm.name)
    except InterlockError as error:
        yield f"its options cannot be read: {error}"
        return
    for name, given in options.given.items():
        if name in OPTIONS[name].items and name not in missing and name != "model":
            planned = getattr(plan, name)
            if planned != given.value:
                yield f"its options ask for {OPTIONS[name].flag} {given.value}, its plan has {planned}"


def _verdict_problems(evidence: Evidence) -> Iterator[str]:
    if evidence.kind != "verify":
        return
    if not evidence.prompts:
        yield "it compares no prompt"
    unexplained = any(not prompt.explained for prompt in evidence.prompts)
    different = any(prompt.outcome == "different" for prompt in evidence.prompts)
    expected = "unexplained" if unexplained else "explained" if different else "equal"
    if evidence.verdict != expected:
        yield f"the verdict is {evidence.verdict!r}, its prompts say {expected!r}"
    for prompt in evidence.prompts:
        if (prompt.outcome == "bit-identical") != (prompt.cause == "" and prompt.largest == 0.0):
            yield f"prompt {prompt.index + 1} is {prompt.outcome} with a difference of {prompt.largest:g}"
