"""A value together with who set it and why: what every rule returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from interlock.option_kinds import AUTO
from interlock.options import OPTIONS, Options
from interlock.plan.launch_plan import Provenance, Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decided(Generic[T]):
    """One plan item before the plan exists."""

    value: T
    source: Source
    reason: str

    @property
    def provenance(self) -> Provenance:
        return Provenance(self.source, self.reason)

    @property
    def by_user(self) -> bool:
        return self.source is Source.USER


def rule(value: T, reason: str) -> Decided[T]:
    """Decided by a rule of the planner, which ``reason`` states."""
    return Decided(value, Source.RULE, reason)


def from_model(value: T, reason: str) -> Decided[T]:
    """Decided by the checkpoint; ``reason`` says by which part of it."""
    return Decided(value, Source.MODEL, reason)


def asked_integer(options: Options, name: str) -> Decided[int] | None:
    """What the user or the default says of an INTEGER or BYTES option; None is auto."""
    value = options.integer(name)
    return None if value is None else Decided(value, *_who(options, name))


def asked_text(options: Options, name: str) -> Decided[str] | None:
    """What the user or the default says of a TEXT or CHOICE option; None is auto."""
    value = options.text(name)
    return None if value is None else Decided(value, *_who(options, name))


def integer(options: Options, name: str) -> Decided[int]:
    """An INTEGER option that has a default."""
    value = asked_integer(options, name)
    assert value is not None, name
    return value


def text(options: Options, name: str) -> Decided[str]:
    """A TEXT or CHOICE option that has a default."""
    value = asked_text(options, name)
    assert value is not None, name
    return value


def number(options: Options, name: str) -> Decided[float]:
    """A NUMBER option."""
    return Decided(options.number(name), *_who(options, name))


def switch(options: Options, name: str) -> Decided[bool]:
    """A SWITCH option."""
    return Decided(options.switch(name), *_who(options, name))


def _who(options: Options, name: str) -> tuple[Source, str]:
    if options.is_set(name):
        source = Source.LAUNCHER if options.given[name].by_launcher else Source.USER
        return source, options.origin(name)
    assert OPTIONS[name].default is not AUTO, name
    return Source.DEFAULT, f"default of {OPTIONS[name].flag}"
