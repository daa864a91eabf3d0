from __future__ import annotations

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


TOLERANCE = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2, "Q4_1": 1e-1, "Q5_0": 1e-1}


@pytest.mark.parametrize("kind", sorted(TOLERANCE))
def test_values_are_those_written_within_the_format(tmp_path: Path, kind: str) -> None:
    """Errors are relative to the largest value of the tensor."""
    file = GgufFile(write_llama_gguf(tmp_path / "a.gguf", kind))
    written = weights()
    assert len(file.tensors) == len(written)
    for name, tensor in written.items():
        if "q_proj" in name or "k_proj" in name:
            continue  # stored in llama.cpp's own row order; the conversion's test covers them
        read, values = file.read(gguf_name(name)), tensor.numpy()
        assert read.shape == values.shape
        np.testing.assert_allclose(read, values, rtol=0, atol=TOLERANCE[kind] * abs(values).max())


def test_metadata_has_the_model_and_its_vocabulary(small: Path) -> None:
    metadata = GgufFile(small).metadata
    assert metadata["general.architecture"] == "llama"
    assert isinstance(metadata["tokenizer.ggml.tokens"], list)
    assert not any(name.startswith("GGUF.") for name in metadata)


def test_unknown_tensor(small: Path) -> None:
    with pytest.raises(InterlockError, match=r"no tensor blk\.9"):
        GgufFile(small).read("blk.9.attn_q.weight")


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_file_is_refused_by_name(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = small.read_bytes()
    last = max(GgufFile(small).tensors.values(), key=lambda tensor: tensor.data_offset)
    kept = data.draw(st.integers(0, int(last.data_offset + last.n_bytes) - 1))
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    path.write_bytes(whole[:kept])
    with pytest.raises(InterlockError, match=r"cut\.gguf"):
        GgufFile(path)


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_header_is_refused_by_name_or_describes_this_file(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 20_000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    refused = None
    try:
        ends = [int(tensor.data_offset + tensor.n_bytes) for tensor in GgufFile(path).tensors.values()]
    except InterlockError as error:
        ends, refused = [], str(error)
    assert refused is None or path.name in refused
    assert max(ends, default=0) <= len(raw)


def test_gguf_names_cover_all_tensors() -> None:
    assert len({gguf_name(name) for name in weights()}) == len(weights())
