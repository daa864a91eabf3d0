"""The vocabulary as grammars see it: the bytes of every token id that the model's logits have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from interlock.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Attributes:
    tokens: bytes by token id, as long as the logits are wide; b"" for ids without a token.
    special: ids that stand for no text (end of turn, padding, ...).
    stop_ids: ids that end an answer.
    """

    tokens: tuple[bytes, ...]
    special: frozenset[int]
    stop_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: Path | str, *, size: int, stop_ids: Iterable[int]) -> Vocabulary:
        """Read the vocabulary of a model folder.

        Args:
            size: width of the model's logits.
        """
        tokenizer = load_tokenizer(folder)
        count = min(size, tokenizer.vocab_size)
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(count)]
        tokens += [b""] * (size - count)
        stops = tuple(token_id for token_id in stop_ids if 0 <= token_id < size)
        return cls(tuple(tokens), tokenizer.special_token_ids, stops)

    def texts(self, markers: Iterable[int] = ()) -> list[bytes]:
        """Bytes by token id, with nothing for special tokens other than ``markers``."""
        silent = (self.special | set(self.stop_ids)) - set(markers)
        texts = list(self.tokens)
        for token_id in silent:
            if token_id < len(texts):
                texts[token_id] = b""
        return texts
