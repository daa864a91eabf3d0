"""What would work instead: neighbours of a refused combination, found by running the rules on them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from interlock.errors import Refusal
from interlock.option_kinds import AUTO, Auto, Kind, Option, Value
from interlock.options import OPTIONS, Options

Edits = Mapping[str, Value | Auto]

WANTED = 3
MAX_TRIES_A_STAGE = 24
MAX_REPAIRS = 8
SIZES = (1, 2, 4, 8, 16, 32, 64)


def with_alternatives(refusal: Refusal, options: Options, attempt: Callable[[Options], object]) -> Refusal:
    """``refusal`` with alternatives that ``attempt`` accepts, nearest first, as flags to paste.

    Stages, until one finds something: the rule's own suggestions; these followed from rule to rule; other
    values of the option at fault; one option of the user's given up; less memory on a rank; as many of the
    user's options as can be kept.
    """
    stages = (_hints, _repaired, _other_values, _one_given_up, _less_memory, _most_kept)
    for stage in stages:
        found: list[str] = []
        for edits in islice(stage(refusal, options, attempt), MAX_TRIES_A_STAGE):
            text = paste(edits)
            if text and text not in found and _works(options.changed(edits), attempt):
                found.append(text)
            if len(found) == WANTED:
                break
        if found:
            return Refusal(option=refusal.option, given=refusal.given, rule=refusal.rule, alternatives=found)
    return Refusal(option=refusal.option, given=refusal.given, rule=refusal.rule)


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


def _repaired(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    """Follow each suggestion: what the next rule refuses is repaired by that rule's first suggestion."""
    for text in refusal.alternatives:
        edits = read_flags(text)
        for _ in range(MAX_REPAIRS):
            try:
                attempt(options.changed(edits))
            except Refusal as next_refusal:
                repairs = [read_flags(hint) for hint in next_refusal.alternatives]
                fresh = [repair for repair in repairs if not repair.keys() & edits.keys()]
                if not fresh:
                    break
                edits |= fresh[0]
            else:
                yield edits
                break


def _other_values(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    option = _at_fault(refusal)
    if option is not None:
        yield from ({option.name: value} for value in _values(option, options))


def _one_given_up(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    for name, value in _resets(options).items():
        yield {name: value}


def _less_memory(refusal: Refusal, options: Options, attempt: Attempt) -> Iterator[Edits]:
    """What takes less memory on a rank: more ranks, also on more machines; narrower or fewer rows."""
    now, nodes = options.integer("tp_size") or 1, options.integer("nnodes") or 1
    address: Edits = {} if options.is_set("dist_init") else {"dist_init": "HOST:29500"}
    for size in SIZES:
        if size > now:
            yield {"tp_size": size}
            yield {"tp_size": size, "dtype": "bfloat16"}
            if size % now == 0:
                yield {"tp_size": size, "nnodes": nodes * size // now, **address}
    yield {"dtype": "bfloat16"}
    for tokens in (2048, 512, 128):
        yield {"chunked_prefill_size": tokens}


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
