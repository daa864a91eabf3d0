"""Arms of a comparison as the command line gives them: ``--arm ep2="--tp-size 2 --ep-size 2"``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlock.errors import Refusal
from interlock.launch import plan_launch
from interlock.option_text import options_of
from interlock.options import Options
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One arm before it is planned: its name and options as given."""

    name: str
    text: str
    options: Options


def parse_arms(texts: Sequence[str], *, ranks_per_gpu: int | None = None) -> list[ArmSpec]:
    """``name=OPTIONS`` for each arm; without any, one arm of default options.

    Args:
        ranks_per_gpu: of arms that do not set it themselves.

    Raises:
        Refusal: an arm without a name, a name given twice, or options that are not.
    """
    arms = [_parse_arm(text) for text in texts] or [ArmSpec("default", "", Options({}))]
    if ranks_per_gpu is not None:
        arms = [_rehearsed(arm, ranks_per_gpu) for arm in arms]
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise Refusal(option="--arm", given=name, rule="two arms cannot have the same name")
    return arms


def _rehearsed(arm: ArmSpec, ranks_per_gpu: int) -> ArmSpec:
    if arm.options.is_set("ranks_per_gpu"):
        return arm
    text = f"{arm.text} --ranks-per-gpu {ranks_per_gpu}".strip()
    return ArmSpec(arm.name, text, options_of(text, f"--arm {arm.name}"))


def _parse_arm(text: str) -> ArmSpec:
    name, equals, options = text.partition("=")
    if not equals or not NAME.fullmatch(name):
        raise Refusal(
            option="--arm",
            given=repr(text),
            rule="an arm is a name, an equals sign and options",
            alternatives=['--arm ep2="--tp-size 2 --ep-size 2 --moe-a2a-backend collective"'],
        )
    return ArmSpec(name, options.strip(), options_of(options, f"--arm {name}"))


def plan_arm(
    arm: ArmSpec,
    model: str,
    pinned: Mapping[str, int | bool | str],
    facts: MachineFacts,
    *,
    yields_to: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """The plan of an arm with what the benchmark pins, where the arm does not set it itself.

    Args:
        pinned: option name -> value.
        yields_to: pinned option -> option of the arm that may contradict it; then the pinned one is left to
            the planner's rules, so that the benchmark shows what that option really allows.

    Raises:
        Refusal: as the planner's; the arm's name is added.
    """
    edits = {name: value for name, value in pinned.items() if not arm.options.is_set(name)}
    options = arm.options.changed(edits)
    try:
        return plan_launch(model, options, facts)
    except Refusal as refusal:
        for name, other in (yields_to or {}).items():
            if name in edits and arm.options.is_set(other):
                rest = {key: value for key, value in edits.items() if key != name}
                return plan_arm(ArmSpec(arm.name, arm.text, arm.options), model, rest, facts)
        raise Refusal(
            option=f"arm {arm.name}: {refusal.option}",
            given=refusal.given,
            rule=refusal.rule,
            alternatives=refusal.alternatives,
        ) from None
