"""Launch options written as one string, as ``verify --candidate`` and ``bench --arm`` take them."""

from __future__ import annotations

import shlex

from interlock.errors import Refusal
from interlock.option_kinds import Kind
from interlock.option_sources import gather, unknown_flag
from interlock.options import OPTIONS, Options


def options_of(text: str, where: str) -> Options:
    """Options written as on the command line of ``serve`` in one string; the environment is not read.

    Raises:
        Refusal: an unknown or unreadable option; ``where`` names the flag that holds the string.
    """
    by_flag = {option.flag: option for option in OPTIONS.values() if option.name != "model"}
    words = [part for word in shlex.split(text) for part in _split(word)]
    values: dict[str, str | bool | None] = {}
    while words:
        flag = words.pop(0)
        positive = "--" + flag.removeprefix("--no-")
        if flag.startswith("--no-") and positive in by_flag and by_flag[positive].kind is Kind.SWITCH:
            values[by_flag[positive].name] = False
            continue
        if flag not in by_flag:
            raise unknown_flag(flag)
        option = by_flag[flag]
        if option.kind is Kind.SWITCH:
            values[option.name] = True
        elif words:
            values[option.name] = words.pop(0)
        else:
            raise Refusal(option=f"{where} {text!r}", given="", rule=f"ends with {flag}, which needs a value")
    return gather(values, config=None, environ={})


def _split(word: str) -> list[str]:
    """``--flag=value`` as two words."""
    return word.split("=", 1) if word.startswith("--") and "=" in word else [word]
