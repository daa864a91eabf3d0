"""Incremental decoding of one stream of token ids."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock.tokenizer.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns a stream of token ids into text, never emitting part of a character.

    The concatenation of all ``push`` results and ``finish`` equals ``tokenizer.decode`` of all ids. At most
    three bytes are held back: the start of a character that may still become valid.

    Args:
        tokenizer: whose vocabulary to use.
        skip_special_tokens: leave out special tokens.
        continues: the ids continue a text, so a leading space belongs to it and is kept (matters for
            SentencePiece vocabularies only, which drop the first space of a text).
        kept: special tokens that are not left out.
    """

    __slots__ = ("_strip", "_token_bytes", "_utf8")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        continues: bool = False,
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self._token_bytes = tokenizer.byte_table(skip_special_tokens, kept)
        self._strip = 0 if continues else tokenizer.strip_left
        self._utf8 = _utf8_decoder("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete after ``ids``; "" while a character is unfinished."""
        table = self._token_bytes
        text = self._utf8.decode(b"".join([table[i] for i in ids]))
        return self._without_first_spaces(text) if self._strip and text else text

    def finish(self) -> str:
        """The rest: U+FFFD if the stream ended inside a character. The detokenizer is then spent."""
        return self._utf8.decode(b"", final=True)

    def _without_first_spaces(self, text: str) -> str:
        rest = text.lstrip(" ")
        removed = min(len(text) - len(rest), self._strip)
        self._strip = self._strip - removed if removed == len(text) else 0
        return text[removed:]
