"""The arena of packed weights."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from interlock.kernels.cpu.arena import WeightArena


def test_tensors_do_not_overlap_and_are_aligned() -> None:
    arena = WeightArena()
    sizes = [1, 1000, 3_000_001, 7, 9_000_000, 33, 4_000_000, 0, 5]
    tensors = [arena.empty(size, torch.float32) for size in sizes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    for value, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert (tensor == value).all()
        assert size == 0 or tensor.data_ptr() % 128 == 0
    assert arena.empty(10, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("elements", [2_500_000, 25_000_000])
def test_memory_returns_when_its_tensors_are_gone(elements: int) -> None:
    arena, process = WeightArena(), psutil.Process()
    tensors = [arena.empty(elements, torch.float32).fill_(1) for _ in range(100_000_000 // elements // 2)]
    held = process.memory_info().rss
    del tensors
    gc.collect()
    assert held - process.memory_info().rss > 150 << 20
