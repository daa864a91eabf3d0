from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.tokenizer import Tokenizer, load_tokenizer

WriteFolder = Callable[..., Path]

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    tiny_tokenizer(512).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_tokenizer_config(4096)))
    return folder


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-style: space marks, byte fallback, the first space of a text dropped."""
    words = ["\u2581", "\u2581the", "\u2581caf", "a", "b", "c", "t", "h", "e", "th", "the", "é", "漢"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    folder = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_folder: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_folder)


@pytest.fixture
def write_folder(tmp_path: Path, byte_level_folder: Path) -> WriteFolder:
    """Writes a folder with the tiny tokenizer and other files: JSON for a mapping, text for a string."""

    def write(**files: Any) -> Path:
        (tmp_path / "tokenizer.json").write_text((byte_level_folder / "tokenizer.json").read_text())
        for name, content in files.items():
            suffix = ".jinja" if isinstance(content, str) else ".json"
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / (name + suffix)).write_text(text)
        return tmp_path

    return write
