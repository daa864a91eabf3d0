"""The way of exchanging that an a2a backend lets the user choose, by an option of the backend's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.decided import Decided, asked_text, rule

if TYPE_CHECKING:
    from interlock.moe.a2a.backend import A2ABackend


def decide_a2a_mode(
    options: Options, backend: A2ABackend, backends: Mapping[str, A2ABackend], nnodes: int
) -> Decided[str]:
    """The mode as asked, or the first that works over ``nnodes`` machines; "" for a backend with one way.

    Raises:
        Refusal: the option belongs to another backend, or the mode does not reach the other machines.
    """
    _refuse_options_of_others(options, backend, backends)
    modes = backend.modes
    if modes is None:
        return rule("", f"--moe-a2a-backend {backend.name} has one way of exchanging")
    works = modes.one_node if nnodes == 1 else modes.several_nodes
    asked = asked_text(options, modes.option)
    where = "one machine" if nnodes == 1 else f"{nnodes} machines (--nnodes {nnodes})"
    if asked is None:
        return rule(works[0], f"what --moe-a2a-backend {backend.name} does on {where}")
    if asked.value in works:
        return asked
    flag = _flag(modes.option)
    raise Refusal(
        option=flag,
        given=asked.value,
        rule=f"does not reach {where}; {' or '.join(works)} does",
        alternatives=[f"{flag} {works[0]}", f"{flag} auto"],
    )


def _refuse_options_of_others(
    options: Options, backend: A2ABackend, backends: Mapping[str, A2ABackend]
) -> None:
    for other in backends.values():
        if other.modes is None or other.name == backend.name:
            continue
        given = asked_text(options, other.modes.option)
        if given is not None:
            raise Refusal(
                option=_flag(other.modes.option),
                given=given.value,
                rule=f"belongs to --moe-a2a-backend {other.name}, and {backend.name} is used, "
                "so the option would have no effect",
                alternatives=[f"{_flag(other.modes.option)} auto", f"--moe-a2a-backend {other.name}"],
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
