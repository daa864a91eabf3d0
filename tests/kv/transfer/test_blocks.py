"""The native copy and its numpy twin against slices."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kv.transfer import blocks
from interlock.kv.transfer.base import TransferError, check_blocks

SIZE = 40_000


def some_blocks(seed: int, count: int) -> np.ndarray:
    """(source, target, length, rows, source stride, target stride), targets apart from each other."""
    rng = random.Random(seed)
    made, at = [], 0
    for _ in range(count):
        length = rng.choice([1, 15, 16, 63, 64, 128, 255, 256, 257, 300, 512, 1000])
        rows = rng.choice([1, 2, 5])
        step, other = length + rng.randint(0, 40), length + rng.randint(0, 40)
        made.append((rng.randrange(SIZE - rows * step), at, length, rows, step, other))
        at += rows * other + rng.randint(0, 9)
    return np.array(made, dtype=np.int64).reshape(-1, 6)


@pytest.mark.parametrize("way", ["cached", "streamed", "numpy"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 6))
def test_every_block_is_copied_and_nothing_else(way: str, seed: int, count: int) -> None:
    table = some_blocks(seed, count)
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    target, due = torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    for start, other_start, length, rows, step, other in table.tolist():
        for row in range(rows):
            at, to = start + row * step, other_start + row * other
            due[to : to + length] = source[at : at + length]
    placed = table.copy()
    placed[:, 0] += source.data_ptr()
    placed[:, 1] += target.data_ptr()
    if way == "numpy":
        blocks.copy_with_numpy(placed)
    else:
        native = blocks.native_copy()
        if native is None:
            pytest.skip("there is no C++ compiler")
        assert native(placed.ctypes.data, len(placed), 0 if way == "streamed" else 1 << 60) == 0
    assert torch.equal(target, due)


@pytest.mark.parametrize(
    "block",
    [
        (0, 90, 11, 1, 0),
        (0, 0, 10, 10, 11),
        (0, -1, 1, 1, 0),
        (0, 0, -1, 1, 0),
        (0, 0, 1, 1 << 40, 1 << 40),
        (0, 0, 1, -1, 1),
        (0, 0, 1, 3, -1),
        (1, 0, 1, 1, 0),
        (-1, 0, 1, 1, 0),
    ],
)
def test_a_block_that_leaves_its_buffer_is_refused(block: tuple[int, ...]) -> None:
    """(buffer, start, length, rows, stride) of a buffer of 100 bytes."""
    good = (0, 1, 9, 10, 10)
    check_blocks("target", *np.array([good], dtype=np.int64).T, [100])
    with pytest.raises(TransferError, match="target buffer"):
        check_blocks("target", *np.array([good, block], dtype=np.int64).T, [100])
