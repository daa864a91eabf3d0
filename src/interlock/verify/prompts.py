"""The prompts: twelve built-in ones whose lengths sit at the edges of the two plans, or the user's file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from interlock.errors import InterlockError
from interlock.plan.launch_plan import LaunchPlan

COUNT = 12
BEYOND_CHUNK = 2
MAX_FILE_BYTES = 16 << 20
STRIDE = 41

TEXT = """\
The signal box stood where the branch left the main line, and its lever frame had forty-two levers. Each
lever moved a set of points or a signal, and beneath the floor the locking bars slid against one another
so that no two movements that could meet were ever allowed together. "A driver trusts the arm he sees,"
said the signalman; "he cannot see the road behind it." In 1859 the first frame of this kind cost 310
pounds, 14 shillings. Rain fell on the 6:45 from Thornbury; 17 passengers, 3 bicycles, 2 crates of pears
(ripe) and a dog got down. def clear(route): return all(lock.set for lock in route.locks) and not
route.occupied Wer zuerst die Weiche stellt, der sperrt die Gegenfahrt. L'aiguille est verrouillée avant
que le signal s'ouvre. Prime numbers below fifty: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47.
What comes next, and why? The clock in the waiting room was four minutes slow, which everybody knew and
nobody mentioned. Outside, the lamps were lit one after another along the platform, and the last train of
the evening was announced.
"""


class Tokeniser(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class DrawnTokens:
    """Stands in for the tokenizer of a model that has none (``shape:NAME``): made-up tokens for each word."""

    NOTE = "prompts of made-up tokens, since the model has no tokenizer"
    TOKENS_OF_A_WORD = 4

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The same text gives the same tokens; a word's depend on its place."""
        places = ((index, word) for index, word in enumerate(text.split()))
        return [
            zlib.crc32(f"{index} {part} {word}".encode()) % self._vocab_size
            for index, word in places
            for part in range(self.TOKENS_OF_A_WORD)
        ]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and where its length comes from ("chunk + 1")."""

    token_ids: tuple[int, ...]
    label: str


def built_in_prompts(
    plans: Sequence[LaunchPlan], tokeniser: Tokeniser, continuation: int, max_length: int | None = None
) -> list[Prompt]:
    """Twelve prompts that share no prefix longer than the special tokens.

    Ten are not longer than the smallest prefill chunk of ``plans`` and two are longer, where the model's
    length limit, and ``max_length`` of a server of another make, allow it.
    """
    body = tokeniser.encode(TEXT, add_special_tokens=False)
    start = tokeniser.encode("", add_special_tokens=True)
    prompts = []
    for index, (length, label) in enumerate(chosen_lengths(plans, continuation, max_length)):
        offset = index * STRIDE
        tokens = start + [body[(offset + i) % len(body)] for i in range(length)]
        prompts.append(Prompt(tuple(tokens[:length]), label))
    return prompts


def chosen_lengths(
    plans: Sequence[LaunchPlan], continuation: int, max_length: int | None = None
) -> list[tuple[int, str]]:
    """Twelve (length, label), ascending: edges first, then lengths between them."""
    limits = [plan.max_model_len for plan in plans] + ([max_length] if max_length else [])
    limit = min(limits) - continuation
    if limit < 1:
        raise InterlockError(f"--max-model-len leaves no room for a prompt and {continuation} more tokens")
    chunk = min(plan.chunked_prefill_size for plan in plans)
    chosen: dict[int, str] = {}
    for length, label in _edges(plans, chunk):
        if length in chosen:
            chosen[length] += f", {label}"
        elif 1 <= length <= min(chunk, limit) and len(chosen) < COUNT - BEYOND_CHUNK:
            chosen[length] = label
    _fill(chosen, min(chunk, limit), COUNT - BEYOND_CHUNK)
    for length, label in _beyond(plans, chunk):
        if length <= limit and len(chosen) < COUNT:
            chosen.setdefault(length, label)
    _fill(chosen, limit, COUNT)
    ordered = sorted(chosen.items())
    return (ordered * COUNT)[:COUNT] if len(ordered) < COUNT else ordered


def _edges(plans: Sequence[LaunchPlan], chunk: int) -> Iterator[tuple[int, str]]:
    """Lengths within the chunk, the most telling first."""
    yield 1, "one token"
    yield chunk, "chunk"
    if chunk > 2:
        yield chunk - 1, "chunk - 1"
    edges = [(plan.page_size, "page") for plan in plans]
    edges += [
        (layer.attention.window, "window")
        for plan in plans
        for layer in plan.card.layers
        if layer.attention.window is not None
    ]
    edges += [(plan.moe_prefill_capacity * plan.attn_tp_size, "capacity") for plan in plans]
    for offset in (0, 1, -1):
        for edge, name in dict.fromkeys(edges):
            yield edge + offset, name + (f" {'+' if offset > 0 else '-'} 1" if offset else "")


def _beyond(plans: Sequence[LaunchPlan], chunk: int) -> Iterator[tuple[int, str]]:
    """Lengths that need a second prefill step in some plan, and in every plan."""
    largest = max(plan.chunked_prefill_size for plan in plans)
    windows = [layer.attention.window or 0 for plan in plans for layer in plan.card.layers]
    yield chunk + 1, "chunk + 1"
    if max(windows) > chunk:
        yield max(windows) + 1, "window + 1"
    yield (largest + 1, "larger chunk + 1") if largest > chunk else (2 * chunk + 1, "2 chunks + 1")
    yield chunk + max(2, chunk // 2), "chunk and a half"
    yield chunk + 2, "chunk + 2"


def _fill(chosen: dict[int, str], limit: int, count: int) -> None:
    """Add lengths up to ``limit`` until there are ``count``, halving the widest gap each time."""
    while len(chosen) < min(count, limit):
        known = [0, *sorted(chosen), limit + 1]
        gaps = [(right - left, left) for left, right in pairwise(known)]
        width, left = max(gaps)
        if width < 2:
            return
        chosen[left + width // 2] = "between"


def prompts_of_file(path: Path, tokeniser: Tokeniser) -> list[Prompt]:
    """One prompt a line: a text, or JSON (``{"prompt": "..."}``, ``{"token_ids": [...]}``, ``[1, 2]``).

    Raises:
        InterlockError: not readable, or a line that is neither.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InterlockError(f"--prompts {path}: larger than {MAX_FILE_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InterlockError(f"--prompts {path}: cannot be read: {error}") from None
    prompts = [
        Prompt(_tokens(line, tokeniser, f"{path}:{number}"), f"line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise InterlockError(f"--prompts {path}: holds no prompt; write one a line")
    return prompts


def _tokens(line: str, tokeniser: Tokeniser, where: str) -> tuple[int, ...]:
    value: object = line
    if line.lstrip()[:1] in ("{", "[", '"'):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = line
    if isinstance(value, dict):
        value = value.get("token_ids", value.get("prompt"))
    if isinstance(value, str) and value:
        return tuple(tokeniser.encode(value))
    if isinstance(value, list) and value and all(_is_id(token) for token in value):
        return tuple(value)
    raise InterlockError(f'{where}: neither a text nor {{"prompt": "..."}} nor {{"token_ids": [1, 2]}}')


def _is_id(token: object) -> bool:
    """Whether it may be a token's id; the engine knows its own vocabulary."""
    return type(token) is int and 0 <= token < 1 << 31
