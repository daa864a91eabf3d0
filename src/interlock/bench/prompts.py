"""Prompts of random tokens or words, from a recorded seed, no two of which share a prefix."""

from __future__ import annotations

import secrets
from collections.abc import Collection

import numpy as np

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
WORDS = tuple(a + b + c for a in CONSONANTS for b in VOWELS for c in CONSONANTS)


def fresh_seed() -> int:
    """A seed that no earlier run had, so that nothing of it is in a prefix cache."""
    return secrets.randbits(48)


def token_prompts(
    count: int, length: int, *, vocab_size: int, avoid: Collection[int], seed: int, salt: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    """``count`` prompts of ``length`` random ids, ids in ``avoid`` excepted; first ids differ while there are
    enough ids for that. The same (seed, salt) gives the same prompts."""
    rng = np.random.default_rng((seed, *salt))
    allowed = np.setdiff1d(np.arange(vocab_size), np.fromiter(avoid, dtype=np.int64, count=len(avoid)))
    tokens = allowed[rng.integers(0, len(allowed), size=(count, length))]
    first = rng.permutation(allowed)
    tokens[:, 0] = first[np.arange(count) % len(first)]
    return [tuple(row) for row in tokens.tolist()]


def text_prompt(index: int, words: int, *, seed: int) -> str:
    """A text of ``words`` words; it begins with a number that no other (seed, index) has."""
    rng = np.random.default_rng((seed, index))
    body = " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size=max(0, words - 1)))
    return f"{seed:x}-{index} {body}".strip()
