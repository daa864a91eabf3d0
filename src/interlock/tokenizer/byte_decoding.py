"""The bytes each token stands for, under the two decoders that language models use.

Text is the UTF-8 decoding of the tokens' bytes, an invalid or cut sequence becoming U+FFFD. Decoding bytes
rather than strings is what makes incremental and one-shot decoding agree whatever the ids are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from interlock.errors import InterlockError

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte value, as {character: byte}."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(rest)}


@dataclass(frozen=True, slots=True)
class ByteLevel:
    """Every character of a token is one byte; a token with any other character is its own UTF-8."""

    alphabet: Mapping[str, int]
    strip_left: int = 0

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one vocabulary entry."""
        try:
            return bytes(map(self.alphabet.__getitem__, token))
        except KeyError:
            return token.encode()


@dataclass(frozen=True, slots=True)
class ByteFallback:
    """SentencePiece: a mark for a space, ``<0xE9>`` a byte; a text loses ``strip_left`` leading spaces."""

    strip_left: int

    def token_bytes(self, token: str) -> bytes:
        """The bytes of one vocabulary entry."""
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(SPACE_MARK, " ").encode()


ByteDecoder = ByteLevel | ByteFallback


def byte_decoder(decoder: Mapping[str, Any] | None) -> ByteDecoder:
    """The decoder for the ``decoder`` entry of a tokenizer.json.

    Raises:
        InterlockError: the entry is neither ByteLevel nor SentencePiece with byte fallback.
    """
    kind = decoder and decoder.get("type")
    steps: list[Mapping[str, Any]] = list(decoder["decoders"]) if decoder and kind == "Sequence" else []
    kinds = [step.get("type") for step in steps]
    if kind == "ByteLevel" or kinds == ["ByteLevel"]:
        return ByteLevel(byte_level_alphabet())
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        strip: Mapping[str, Any] = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        plain = replace.get("pattern") == {"String": SPACE_MARK} and replace.get("content") == " "
        if plain and strip.get("content") == " " and strip.get("stop") == 0:
            return ByteFallback(strip_left=int(strip["start"]))
    found = " > ".join(map(str, kinds)) if kinds else str(kind)
    raise InterlockError(
        f"tokenizer.json: the decoder {found} is not supported; byte-level BPE (ByteLevel) and SentencePiece "
        "with byte fallback (Replace > ByteFallback > Fuse > Strip) are"
    )
