from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from interlock.errors import InterlockError, RequestError
from interlock.tokenizer import Tokenizer, load_tokenizer

WriteFolder = Callable[..., Path]


@given(text=st.text(max_size=80))
def test_text_round_trips(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


def test_sizes_and_special_ids(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == 512
    assert byte_level.eos_token_ids == (2,)
    assert byte_level.bos_token_id is None
    assert byte_level.pad_token_id == 0
    assert byte_level.special_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 2, 7]}}, (5, 2, 7)),
        ({"generation_config": {"eos_token_id": 9}, "config": {"eos_token_id": 8}}, (9,)),
        ({"config": {"eos_token_id": 8}}, (8,)),
        ({"config": {"eos_token_id": 8}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (8, 2)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (2,)),
        ({"special_tokens_map": {"eos_token": "<|endoftext|>"}}, (0,)),
        ({}, ()),
    ],
)
def test_ids_that_end_a_generation(
    write_folder: WriteFolder, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    assert load_tokenizer(write_folder(**files)).eos_token_ids == expected


def test_an_end_id_that_is_no_id_is_refused(write_folder: WriteFolder) -> None:
    with pytest.raises(InterlockError, match="eos_token_id"):
        load_tokenizer(write_folder(generation_config={"eos_token_id": ["</s>"]}))


def test_special_tokens_parsed_in_text(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|im_start|>") == [1]
    assert [byte_level.token_text(i) for i in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_token_text_of_part_of_a_character(byte_level: Tokenizer) -> None:
    first = 3 + 0xC3
    assert byte_level.token_bytes(first) == b"\xc3"
    assert byte_level.token_text(first) == "\ufffd"


def with_bos(folder: Path) -> Path:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("written", [True, False])
def test_bos_comes_once(write_folder: WriteFolder, written: bool) -> None:
    """G23: a chat template decides about BOS in a conversation, the tokenizer in a plain text."""
    prefix = "{{ bos_token }}" if written else ""
    template = prefix + "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<|im_start|>", "chat_template": template}
    tokenizer = load_tokenizer(with_bos(write_folder(tokenizer_config=config)))
    assert tokenizer.bos_token_id == 1
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    a = 3 + ord("a")
    assert tokenizer.encode(text, add_special_tokens=False) == ([1, a] if written else [a])
    assert tokenizer.encode("a") == [1, a]
    assert tokenizer.encode("a", add_special_tokens=False) == [a]


def test_truncation_and_padding_stored_in_the_file_are_ignored(
    tmp_path: Path, byte_level_folder: Path
) -> None:
    backend = Backend.from_file(str(byte_level_folder / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("1" * 20)) == 20


def test_a_lone_surrogate_is_a_request_error(byte_level: Tokenizer) -> None:
    """G17: JSON lets it through; UTF-8 has no such character."""
    with pytest.raises(RequestError, match=r"U\+D800 at character 1"):
        byte_level.encode("a\ud800b")


def test_empty_text_has_no_ids(byte_level: Tokenizer) -> None:
    """G14: an empty prompt is seen as such, so that the server can refuse it."""
    assert byte_level.encode("") == []
    assert byte_level.decode([]) == ""


def test_missing_and_broken_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(InterlockError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InterlockError, match="no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_broken_config_is_explained(write_folder: WriteFolder) -> None:
    folder = write_folder()
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InterlockError, match="must hold a JSON object"):
        load_tokenizer(folder)


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InterlockError, match="decoder WordPiece is not supported"):
        load_tokenizer(tmp_path)


@given(text=st.text(max_size=60))
def test_ids_equal_those_of_transformers(byte_level_folder: Path, byte_level: Tokenizer, text: str) -> None:
    other = transformers_tokenizer(byte_level_folder)
    assert byte_level.encode(text) == other(text).input_ids


_CACHE: dict[Path, object] = {}


def transformers_tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    if folder not in _CACHE:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        _CACHE[folder] = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token=config["eos_token"]
        )
    return _CACHE[folder]
