"""Two-batch overlap: whether a step's tokens are exchanged in halves, one beside the experts of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.capacity import Limits
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_text, rule
from interlock.plan.join import Declarations

if TYPE_CHECKING:
    from interlock.moe.a2a.backend import A2ABackend

_ON = "--moe-overlap on"


def decide_overlap(
    options: Options, card: ModelCard, backend: A2ABackend, declared: Declarations, limits: Limits
) -> Decided[bool]:
    """As asked; without being asked it is off, since halves cost two exchanges and nothing here shows a gain.

    Raises:
        Refusal: the backend does not declare that it allows it, or there is nothing to halve.
    """
    asked = asked_text(options, "moe_overlap")
    if asked is None:
        return rule(False, f"no recorded run shows that it wins ({_ON} to try)")
    if asked.value == "off":
        return Decided(False, asked.source, asked.reason)
    problem = _problem(card, backend, limits)
    if problem is not None:
        able = [f"--moe-a2a-backend {other.name}" for other in declared.a2a.values() if other.overlap]
        raise Refusal(
            option="--moe-overlap",
            given="on",
            rule=problem,
            alternatives=["--moe-overlap off", *(able if card.experts and not backend.overlap else [])],
        )
    return Decided(True, asked.source, asked.reason)


def _problem(card: ModelCard, backend: A2ABackend, limits: Limits) -> str | None:
    if card.experts is None:
        return "this model has no experts, so the option would have no effect"
    if not backend.overlap:
        return f"--moe-a2a-backend {backend.name} does not exchange beside other work"
    for name, capacity in (
        ("--moe-prefill-capacity", limits.prefill_capacity),
        ("--moe-decode-capacity", limits.decode_capacity),
    ):
        if capacity.value < 2:
            return f"a step of one token on a rank ({name} {capacity.value}) has no halves"
    return None
