"""Copying of strided blocks within this process's memory: one native call, or numpy without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from interlock.errors import InterlockError
from interlock.kv.transfer.base import Int64s

COLUMNS = 6
STREAM_BYTES = 4 << 20
"""Copies of at least as many bytes go past the caches."""


def copy_blocks(
    source: Int64s, target: Int64s, length: Int64s, rows: Int64s, source_stride: Int64s, target_stride: Int64s
) -> None:
    """Copy, all int64 [blocks]: ``rows`` times ``length`` bytes, at ``source + i * source_stride`` to
    ``target + i * target_stride``. ``source`` and ``target`` are addresses that the caller has checked.

    Python threads run meanwhile.
    """
    blocks = np.stack([source, target, length, rows, source_stride, target_stride], axis=1)
    assert blocks.shape[1] == COLUMNS
    assert blocks.dtype == np.int64
    native = native_copy()
    if native is None:
        copy_with_numpy(blocks)
    else:
        native(blocks.ctypes.data, len(blocks), STREAM_BYTES)


@cache
def native_copy() -> Callable[[int, int, int], int] | None:
    """The compiled function, built on first use; None where there is no compiler."""
    from interlock.kernels.availability import native_cpu_unavailable
    from interlock.kernels.cpu.build import build_library

    if native_cpu_unavailable() is not None:
        return None
    try:
        path = build_library(sources=Path(__file__).parent / "native", name="interlock_copy.so")
    except InterlockError:
        return None
    function = ctypes.CDLL(str(path)).interlock_copy_blocks
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


def copy_with_numpy(blocks: Int64s) -> None:
    """What ``native_copy`` does; int64 [blocks, 6]. Slower where blocks are small."""
    for source, target, length, rows, source_stride, target_stride in blocks.tolist():
        if not rows or not length:
            continue
        _view(target, length, rows, target_stride)[:] = _view(source, length, rows, source_stride)


def _view(
    address: int, length: int, rows: int, stride: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """uint8 [rows, length] of plain memory."""
    extent = (rows - 1) * stride + length
    memory = (ctypes.c_uint8 * extent).from_address(address)
    return np.ndarray((rows, length), dtype=np.uint8, buffer=memoryview(memory), strides=(stride, 1))
