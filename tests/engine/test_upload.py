"""Arrays that travel to a device by one copy come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.upload import BOUNDARY, pack, packed_bytes, unpack, upload_together

DTYPES = (np.int32, np.int64, np.float32, np.bool_)


@st.composite
def arrays(draw) -> list[np.ndarray]:
    shapes = draw(st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=2), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return [random.integers(0, 99, shape).astype(draw(st.sampled_from(DTYPES))) for shape in shapes]


@given(arrays())
def test_what_was_packed_is_unpacked(given_arrays) -> None:
    packed = torch.full((packed_bytes(given_arrays),), 255, dtype=torch.uint8)
    pack(given_arrays, packed)
    parts = unpack(packed.clone(), given_arrays)
    for array, part in zip(given_arrays, parts, strict=True):
        assert part.dtype == torch.from_numpy(array).dtype
        assert tuple(part.shape) == array.shape
        assert np.array_equal(part.numpy(), array)
        assert part.storage_offset() * part.element_size() % BOUNDARY == 0
        assert part.is_contiguous()


def test_a_view_is_packed_in_its_own_order() -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)[:, :2]
    packed = torch.empty(packed_bytes([table]), dtype=torch.uint8)
    pack([table], packed)
    assert unpack(packed, [table])[0].tolist() == [[0, 1], [4, 5], [8, 9]]


def test_on_a_cpu_they_are_shared() -> None:
    array = np.zeros(3, dtype=np.int64)
    [there] = upload_together([array], "cpu")
    array[1] = 7
    assert there.tolist() == [0, 7, 0]


@pytest.mark.gpu
def test_on_a_gpu_they_arrive() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sent = [np.arange(5, dtype=np.int64), np.zeros((0, 3), dtype=np.int32), np.ones((2, 2), dtype=np.int32)]
    for array, there in zip(sent, upload_together(sent, "cuda"), strict=True):
        assert there.is_cuda
        assert np.array_equal(there.cpu().numpy(), array)
