"""Files, headers and the index of a checkpoint folder."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from interlock.checkpoint.index import read_folder, read_header
from interlock.errors import CheckpointError
from tests.checkpoint.files import write_sharded

A, B = torch.arange(12.0).view(3, 4), torch.ones(5, dtype=torch.bfloat16)


def write_raw(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_says_where_each_tensor_lies(tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_folder(tmp_path).tensors
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        "a": ("F32", (3, 4)),
        "b": ("BF16", (5,)),
    }
    raw = (tmp_path / "model.safetensors").read_bytes()
    a = tensors["a"]
    assert raw[a.offset : a.offset + a.nbytes] == A.numpy().tobytes()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw[: len(raw) // 2], "complete|truncated"),
        (lambda raw: raw[:20], "its header claims"),
        (lambda raw: raw + bytes(8), "padded"),
        (lambda raw: b"", "0 bytes"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    ],
    ids=["one byte short", "half", "inside header", "8 bytes more", "empty", "git-lfs pointer"],
)
def test_a_damaged_file_is_named(tmp_path: Path, spoil: Any, says: str) -> None:
    """J07: truncated, padded, empty or pointer files give a message with the file and what is wrong."""
    file = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, file)
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckpointError, match=says) as caught:
        read_folder(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"{", b"", "malformed"),
        (b"[]", b"", "malformed"),
        (b"[" * 100_000, b"", "malformed"),
        (b'{"a": 1, "a": 2}', b"", "appears twice"),
        ({"a": {"dtype": "F32"}}, b"", "entry for 'a'"),
        ({"a": entry("F32", [-1], 0, 4)}, bytes(4), "entry for 'a'"),
        ({"a": entry("F32", [1 << 62], 0, 4)}, bytes(4), "needs"),
        ({"a": entry("F32", [2], 0, 4)}, bytes(4), "needs 8 bytes"),
        ({"a": entry("F4", [2], 0, 4)}, bytes(4), "unknown dtype 'F4'"),
        ({"a": entry("F32", [1], 4, 8)}, bytes(8), "gap or overlap"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8), "gap or overlap"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, bytes(4), "gap or overlap"),
    ],
)
def test_a_lying_header_is_refused_before_anything_is_allocated(
    tmp_path: Path, header: Any, data: bytes, says: str
) -> None:
    file = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says):
        read_header(file)


def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "model.safetensors", b"{}", b"", length=1 << 60)
    with pytest.raises(CheckpointError, match="header claims 1152921504606846976"):
        read_header(file)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    file.write_bytes(raw)
    with suppress(CheckpointError):
        assert isinstance(read_header(file), dict)


def test_missing_shards_and_tensors_are_all_named(tmp_path: Path) -> None:
    """J05: a shard the index lists is absent, and a tensor is not where the index puts it."""
    folder = write_sharded(
        tmp_path,
        {"one.safetensors": {"a": A}},
        {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"},
    )
    with pytest.raises(CheckpointError) as caught:
        read_folder(folder)
    text = str(caught.value)
    assert "2 problems" in text
    assert "'b' is not in one.safetensors" in text
    assert "two.safetensors: no such file" in text


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', "[", '{"weight_map": 3}'])
def test_an_empty_or_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    """J05: an empty index is not an empty model."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"weight_map|malformed"):
        read_folder(tmp_path)


def test_a_stray_file_changes_nothing(tmp_path: Path) -> None:
    """J06: the index is authoritative; files it does not list are never opened."""
    folder = write_sharded(tmp_path, {"one.safetensors": {"a": A}})
    save_file({"a": A + 1}, folder / "old.safetensors")
    assert read_folder(folder).tensors["a"].path.name == "one.safetensors"


def test_unlisted_tensors_of_a_listed_file_are_counted(tmp_path: Path) -> None:
    """J06: a tensor that the index leaves out is reported and not read."""
    folder = write_sharded(tmp_path, {"one.safetensors": {"a": A, "b": B}}, {"a": "one.safetensors"})
    index = read_folder(folder)
    assert list(index.tensors) == ["a"]
    assert index.unlisted == ("b",)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """J06: which of the two would win?"""
    folder = write_sharded(
        tmp_path, {"one.safetensors": {"a": A, "c": B}, "two.safetensors": {"a": A + 1, "b": B}}
    )
    with pytest.raises(CheckpointError, match=r"'a' is in two files: one\.safetensors and two"):
        read_folder(folder)


@pytest.mark.parametrize(
    "where",
    ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a.bin", 3, "a\\b.safetensors"],
)
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, where: object) -> None:
    save_file({"a": A}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": where}}))
    with pytest.raises(CheckpointError, match="only the plain name"):
        read_folder(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only safetensors"):
        read_folder(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({name: A}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"one.safetensors, two.safetensors"):
        read_folder(tmp_path)
