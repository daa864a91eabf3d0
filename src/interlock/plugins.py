"""Declarations by name: the built-in ones and those that other packages register through entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, Protocol, TypeVar

from interlock.errors import InterlockError


class Declared(Protocol):
    """Anything that is registered under a name."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Declared)


@dataclass(frozen=True, slots=True)
class Catalogue(Generic[T]):
    """What can be chosen, and what was registered but is broken.

    Attributes:
        kind: what the entries are, for messages ("a2a backend").
        entries: declarations by name.
        broken: entry-point name -> why it could not be used. A broken plugin hurts only who asks for it.
    """

    kind: str
    entries: Mapping[str, T]
    broken: Mapping[str, str]

    def get(self, name: str) -> T:
        """The declaration called ``name``.

        Raises:
            InterlockError: unknown or broken, with the reason and the names that exist.
        """
        if name in self.entries:
            return self.entries[name]
        if name in self.broken:
            raise InterlockError(f"{self.kind} {name!r} is registered but broken: {self.broken[name]}")
        raise InterlockError(f"unknown {self.kind} {name!r}; available: {', '.join(sorted(self.entries))}")


def load_symbol(path: str) -> Any:
    """Import ``"package.module:name"``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def discover(*, kind: str, group: str, built_in: Sequence[str], expected: type[T]) -> Catalogue[T]:
    """Load the built-in declarations ("module:NAME") and those of entry-point group ``group``.

    A plugin that cannot be imported, is not an ``expected``, or takes a name that is already taken goes to
    ``broken`` with the reason.
    """
    entries: dict[str, T] = {}
    broken: dict[str, str] = {}
    for path in built_in:
        declaration: T = load_symbol(path)
        entries[declaration.name] = declaration
    for entry in sorted(entry_points(group=group), key=lambda e: (e.name, e.value)):
        try:
            candidate = entry.load()
        except Exception as error:
            broken[entry.name] = f"importing {entry.value} raised {type(error).__name__}: {error}"
            continue
        if not isinstance(candidate, expected):
            broken[entry.name] = f"{entry.value} is {type(candidate).__name__}, not {expected.__name__}"
        elif candidate.name in entries:
            broken[entry.name] = f"{entry.value} takes the name {candidate.name!r}, which exists already"
        else:
            entries[candidate.name] = candidate
    return Catalogue(kind=kind, entries=entries, broken=broken)
