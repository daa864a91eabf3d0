from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.demo.gguf import GgufFile
from interlock.errors import InterlockError

from .tiny_llama import gguf_name, weights, write_llama_gguf


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf", "Q8_0")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_values_equal_the_gguf_package(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_llama_gguf(tmp_path / "a.gguf", kind)
    ours, theirs = GgufFile(path), gguf.GGUFReader(str(path))
    assert len(ours.tensors) == len(theirs.tensors) == len(weights())
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), expected)


def test_metadata_equals_the_gguf_package(small: Path) -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {
        name: field.contents()
        for name, field in gguf.GGUFReader(str(small)).fields.items()
        if not name.startswith("GGUF.")
    }
    assert GgufFile(small).metadata == theirs


def test_unknown_tensor(small: Path) -> None:
    with pytest.raises(InterlockError, match=r"no tensor blk\.9"):
        GgufFile(small).read("blk.9.attn_q.weight")


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_file_is_refused_by_name(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = small.read_bytes()
    last = max(GgufFile(small).tensors.values(), key=lambda t: t.offset)
    kept = data.draw(st.integers(0, last.offset + last.size - 1))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(whole[:kept])
    with pytest.raises(InterlockError, match=r"cut\.gguf"):
        GgufFile(path)


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_headers_never_crash(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 20_000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(InterlockError):
        GgufFile(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "a.gguf", "Q5_0")
    with pytest.raises(InterlockError, match="format number 6; F32, F16"):
        GgufFile(path)


def test_gguf_names_cover_all_tensors() -> None:
    assert len({gguf_name(name) for name in weights()}) == len(weights())
