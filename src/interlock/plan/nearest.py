"""What would work instead: neighbours of a refused combination, found by running the rules on them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping

from interlock.errors import Refusal
from interlock.option_kinds import AUTO, Auto, Kind, Option, Value
from interlock.options import OPTIONS, Options

Edits = Mapping[str, Value | Auto]

WANTED = 3
MAX_TRIES = 160
SIZES = (1, 2, 4, 8, 16, 32, 64)


def with_alternatives(refusal: Refusal, options: Options, attempt: Callable[[Options], object]) -> Refusal:
    """``refusal`` with alternatives that ``attempt`` accepts, nearest first, as flags to paste.

    The rule's own suggestions come first, then other values of the option at fault, then options of the
    user's given up one by one, then more ranks, then as many of the user's options as can be kept.
    """
    found: list[str] = []
    tried: set[str] = set()
    for stage in (_hints, _other_values, _one_given_up, _more_ranks, _most_kept):
        for edits in stage(refusal, options, attempt):
            text = paste(edits)
            if not edits or text in tried or len(tried) >= MAX_TRIES:
                continue
            tried.add(text)
            if _works(options.changed(edits), attempt):
                found.append(text)
            if len(found) == WANTED:
                break
        if found:
            break
    return Refusal(option=refusal.option, given=refusal.given, rule=refusal.rule, alternatives=found)


def paste(edits: Edits) -> str:
    """Edits as flags, ``{"tp_size": 2}`` -> ``--tp-size 2``."""
    return " ".join(OPTIONS[name].paste(value) for name, value in edits.items())


def read_flags(text: str) -> dict[str, Value | Auto]:
    """Inverse of ``paste``.

    Raises:
        Refusal: a flag or value that no option takes.
    """
    by_flag = {option.flag: option for option in OPTIONS.values()}
    edits: dict[str, Value | Auto] = {}
    words = iter(shlex.split(text))
    for word in words:
        option = by_flag.get(word) or by_flag.get("--" + word.removeprefix("--no-"))
        if option is None:
            raise Refusal(option=word, given="", rule="is not an option")
        if option.kind is Kind.SWITCH:
            edits[option.name] = word == option.flag
        else:
            edits[option.name] = option.parse(next(words, ""), option.flag)
    return edits


def _works(options: Options, attempt: Callable[[Options], object]) -> bool:
    try:
        attempt(options)
    except Refusal:
        return False
    return True


Attempt = Callable[[Options], object]


def _hints(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    for text in refusal.alternatives:
        yield read_flags(text)


def _other_values(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    option = _at_fault(refusal)
    if option is not None:
        yield from ({option.name: value} for value in _values(option, options))


def _one_given_up(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    option = _at_fault(refusal)
    resets = _resets(options)
    for name, value in resets.items():
        yield {name: value}
    if option is None:
        return
    for value in _values(option, options):
        for name, reset in resets.items():
            if name != option.name:
                yield {option.name: value, name: reset}


def _more_ranks(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    now = options.integer("tp_size") or 1
    for size in SIZES:
        if size > now:
            yield {"tp_size": size}
            yield {"tp_size": size, "dtype": "bfloat16"}


def _most_kept(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    """Give everything up, then take the user's options back one by one while the rules hold."""
    resets = _resets(options)
    if not _works(options.changed(resets), attempt):
        return
    given_up = dict(resets)
    for name in resets:
        fewer = {other: value for other, value in given_up.items() if other != name}
        if _works(options.changed(fewer), attempt):
            given_up = fewer
    yield given_up


def _at_fault(refusal: Refusal) -> Option | None:
    return next((option for option in OPTIONS.values() if option.flag == refusal.option), None)


def _resets(options: Options) -> dict[str, Value | Auto]:
    """Every option of the user's that has a default, back at it."""
    resets: dict[str, Value | Auto] = {}
    for name in options.given:
        default = OPTIONS[name].default
        if default is not None:
            resets[name] = default
    return resets


def _values(option: Option, options: Options) -> Iterator[Value | Auto]:
    """Other values of one option, nearest first."""
    if option.default is AUTO and options.is_set(option.name):
        yield AUTO
    if option.kind is Kind.CHOICE:
        yield from (name for name in option.allowed() if name != options.text(option.name))
    elif option.kind is Kind.SWITCH:
        yield not options.switch(option.name)
    elif option.kind is Kind.INTEGER:
        now = options.integer(option.name) or 1
        least = int(option.minimum or 0)
        near = {now - 1, now + 1, now // 2, now * 2, *SIZES}
        ordered = sorted((size for size in near if size >= least and size != now), key=lambda s: abs(s - now))
        yield from ordered
