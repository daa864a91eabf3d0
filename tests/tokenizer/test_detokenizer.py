from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from interlock.tokenizer import Detokenizer, Tokenizer

FIRST_BYTE = 3  # in both test vocabularies, bytes follow three special tokens
KINDS = ("byte_level", "sentencepiece")


def byte_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, width: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [detokenizer.push(ids[i : i + width]) for i in range(0, len(ids), width)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 540), max_size=40), width=st.integers(1, 5), skip=st.booleans())
def test_the_pieces_join_to_the_decoded_whole(
    byte_level: Tokenizer, sentencepiece: Tokenizer, kind: str, ids: list[int], width: int, skip: bool
) -> None:
    tokenizer = {"byte_level": byte_level, "sentencepiece": sentencepiece}[kind]
    assert "".join(stream(tokenizer, ids, skip=skip, width=width)) == tokenizer.decode(ids, skip)


@given(ids=st.lists(st.integers(0, 511), max_size=40), skip=st.booleans())
def test_decode_equals_the_library_for_byte_level(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    backend = byte_level._backend
    assert byte_level.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30), skip=st.booleans())
def test_decode_equals_the_library_for_sentencepiece(sentencepiece: Tokenizer, text: str, skip: bool) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    library: Backend = sentencepiece._backend
    assert sentencepiece.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_a_text_survives_byte_by_byte(byte_level: Tokenizer, text: str) -> None:
    pieces = stream(byte_level, byte_ids(text.encode()))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", ["é", "漢", "🎉", "👨‍👩‍👧‍👦", "e\u0301"])
def test_no_part_of_a_character_is_emitted(byte_level: Tokenizer, text: str) -> None:
    """G08: each byte a token; nothing but whole characters comes out, and all of them do."""
    pieces = stream(byte_level, byte_ids(text.encode()))
    assert [piece for piece in pieces if piece] == list(text)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_stream_that_ends_inside_a_character_gives_one_replacement(
    byte_level: Tokenizer, kept: int
) -> None:
    """G08: cut by a length limit; the same single U+FFFD in the stream and in the whole."""
    ids = byte_ids(b"ab" + "🎉".encode()[:kept])
    assert stream(byte_level, ids) == ["a", "b", *[""] * kept, "\ufffd"]
    assert byte_level.decode(ids) == "ab\ufffd"


@pytest.mark.parametrize("byte", [0x80, 0xFF, 0xC0])
def test_invalid_bytes_are_not_held(byte_level: Tokenizer, byte: int) -> None:
    """G08: a run of 20 invalid bytes comes out as it arrives."""
    assert stream(byte_level, byte_ids(bytes([byte] * 20))) == ["\ufffd"] * 20 + [""]


def test_at_most_three_bytes_are_held(byte_level: Tokenizer) -> None:
    """G08: a lead byte again and again never starts a character that ends; each is given up for the next."""
    pieces = stream(byte_level, byte_ids(b"\xf0\x9f\x8e" * 7))
    assert pieces[0:3] == ["", "", ""]
    assert "".join(pieces[3:]) == "\ufffd" * 7


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = [1, *byte_ids(b"hi"), 2, 0]
    assert "".join(stream(byte_level, ids)) == "hi"
    assert "".join(stream(byte_level, ids, skip=False)) == "<|im_start|>hi<|im_end|><|endoftext|>"


def test_a_special_token_inside_a_character_does_not_lose_the_character(byte_level: Tokenizer) -> None:
    first, second = byte_ids("é".encode())
    assert "".join(stream(byte_level, [first, 2, second])) == "é"


def test_only_the_first_space_of_a_sentencepiece_text_goes(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.encode("the", add_special_tokens=False)
    assert stream(sentencepiece, the * 3) == ["the", " the", " the", ""]
    assert "".join(stream(sentencepiece, [1, *the, *the])) == "the the"


def test_a_continuation_keeps_its_first_space(sentencepiece: Tokenizer) -> None:
    detokenizer = Detokenizer(sentencepiece, continues=True)
    assert detokenizer.push(sentencepiece.encode("the", add_special_tokens=False)) == " the"


def test_ids_beyond_the_vocabulary_give_nothing(byte_level: Tokenizer) -> None:
    """A model's logits may be wider than its tokenizer's vocabulary."""
    assert stream(byte_level, [10**6, *byte_ids(b"a"), -1]) == ["", "a", "", ""]
