"""What an option is: its type, how its text is read, and how a value is written as a flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from interlock.errors import Refusal


class Auto(Enum):
    """The value of an option that a rule of the planner fills."""

    AUTO = "auto"


AUTO: Final = Auto.AUTO


class Secret:
    """A string that no repr, log line or plan shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"


Value = int | float | str | bool | Secret
Choices = tuple[str, ...] | Callable[[], tuple[str, ...]]


class Kind(Enum):
    """How the text of an option is read; the value is how help names it."""

    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    BYTES = "bytes"
    SWITCH = "on|off"
    CHOICE = "choice"
    SECRET = "secret"


class Section(Enum):
    """Groups of options, as help and docs show them."""

    MODEL = "Model"
    DEVICE = "Device"
    PARALLEL = "Parallelism"
    EXPERTS = "Experts"
    MEMORY = "Batching and memory"
    DISAGGREGATION = "Prefill/decode disaggregation"
    SERVER = "Server"


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        default: ``AUTO``, a value, or None where "not given" is meaningful (no API key).
        items: plan items that the option sets.
        minimum: smallest value of an INTEGER, NUMBER or BYTES option.
        broken: computes choices that are installed but cannot be used, with the reason.
        peers: spellings of the same thing in other engines, for suggestions only.
        engine: False for options that only the HTTP front end uses.
    """

    name: str
    kind: Kind
    default: Value | Auto | None
    section: Section
    items: tuple[str, ...]
    help: str
    choices: Choices | None = None
    broken: Callable[[], Mapping[str, str]] | None = None
    minimum: float | None = None
    peers: tuple[str, ...] = ()
    engine: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "INTERLOCK_" + self.name.upper()

    def allowed(self) -> tuple[str, ...]:
        """The choices, computed now; empty for an option that is not a CHOICE."""
        if self.choices is None:
            return ()
        return self.choices() if callable(self.choices) else self.choices

    def parse(self, text: str, spelled: str) -> Value | Auto:
        """Read ``text``; ``spelled`` names the source (flag, key or variable) in refusals."""
        if text == "auto" and self.default is AUTO:
            return AUTO
        if self.kind is Kind.SECRET:
            if not text.strip():
                raise Refusal(option=spelled, given="''", rule="an empty key protects nothing")
            return Secret(text.strip())
        value = _READERS[self.kind](self, text, spelled)
        if self.minimum is not None and isinstance(value, int | float) and value < self.minimum:
            raise Refusal(
                option=spelled,
                given=text,
                rule=f"must be at least {self.minimum:g}",
                alternatives=(self.paste(self.minimum),),
            )
        return value

    def paste(self, value: object) -> str:
        """``value`` as a flag to paste."""
        if self.kind is Kind.SWITCH:
            return self.flag if value in (True, "on") else "--no-" + self.flag[2:]
        if isinstance(value, Auto):
            return f"{self.flag} auto"
        if self.kind is Kind.BYTES and isinstance(value, int):
            return f"{self.flag} {_exact_size(value)}"
        return f"{self.flag} {value:g}" if isinstance(value, float) else f"{self.flag} {value}"


def _read_integer(option: Option, text: str, spelled: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", text.strip()):
        raise Refusal(option=spelled, given=repr(text), rule=f"is not a whole number{_or_auto(option)}")
    return int(text)


def _read_number(option: Option, text: str, spelled: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value or value in (float("inf"), float("-inf")):
        raise Refusal(option=spelled, given=repr(text), rule=f"is not a number{_or_auto(option)}")
    return value


_UNITS: Final = MappingProxyType(
    {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    | {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
)


def _read_bytes(option: Option, text: str, spelled: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise Refusal(
            option=spelled,
            given=repr(text),
            rule=f"is not a size such as 4GiB, 512MiB or 1000000{_or_auto(option)}",
            alternatives=(f"{option.flag} 4GiB",),
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _exact_size(count: int) -> str:
    """The largest binary unit in which ``count`` bytes are whole."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def _read_switch(option: Option, text: str, spelled: str) -> bool:
    word = text.strip().lower()
    if word in ("on", "true", "1", "yes"):
        return True
    if word in ("off", "false", "0", "no"):
        return False
    raise Refusal(
        option=spelled,
        given=repr(text),
        rule="is a switch: on or off",
        alternatives=(option.paste(True), option.paste(False)),
    )


def _read_choice(option: Option, text: str, spelled: str) -> str:
    allowed = option.allowed()
    reason = option.broken().get(text) if option.broken else None
    if text not in allowed and reason:
        raise Refusal(option=spelled, given=text, rule=f"is installed but broken: {reason}")
    if text not in allowed:
        raise Refusal(
            option=spelled,
            given=repr(text),
            rule=f"is none of {', '.join(allowed)}{_or_auto(option)}",
            alternatives=tuple(option.paste(name) for name in closest(text, allowed)),
        )
    return text


def _read_text(option: Option, text: str, spelled: str) -> str:
    if not text.strip():
        raise Refusal(option=spelled, given="''", rule="must not be empty")
    return text


_READERS: Final[Mapping[Kind, Callable[[Option, str, str], Value]]] = MappingProxyType(
    {
        Kind.INTEGER: _read_integer,
        Kind.NUMBER: _read_number,
        Kind.BYTES: _read_bytes,
        Kind.SWITCH: _read_switch,
        Kind.CHOICE: _read_choice,
        Kind.TEXT: _read_text,
    }
)


def _or_auto(option: Option) -> str:
    return " or auto" if option.default is AUTO else ""


def closest(word: str, names: tuple[str, ...], limit: int = 3) -> tuple[str, ...]:
    """The names that ``word`` most likely meant, best first; all of a short list when nothing is near."""
    from difflib import get_close_matches

    near = tuple(get_close_matches(word, names, n=limit, cutoff=0.6))
    return near or (names if len(names) <= limit else ())
