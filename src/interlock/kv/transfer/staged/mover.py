"""Gathers blocks of a rank's buffers into one run of host memory and scatters them back, on CPU and CUDA."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from interlock.kv.transfer.base import Int64s, Pieces, TransferError, check_blocks
from interlock.kv.transfer.blocks import copy_blocks

_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Blocks:
    """One side of ``Pieces``, all int64 [blocks]; packed they lie one behind the other."""

    buffer: Int64s
    start: Int64s
    length: Int64s
    rows: Int64s
    stride: Int64s

    @staticmethod
    def source(pieces: Pieces) -> Blocks:
        return Blocks(pieces.source_buffer, pieces.source, pieces.length, pieces.rows, pieces.source_stride)

    @staticmethod
    def target(pieces: Pieces) -> Blocks:
        return Blocks(pieces.target_buffer, pieces.target, pieces.length, pieces.rows, pieces.target_stride)

    @staticmethod
    def unpack(columns: bytes) -> Blocks:
        """Of ``pack``. Raises ``TransferError`` for anything else."""
        if len(columns) % (5 * 8):
            raise TransferError("the list of pieces is not five columns of int64")
        return Blocks(*np.frombuffer(columns, dtype="<i8").reshape(5, -1))

    def pack(self) -> bytes:
        columns = [self.buffer, self.start, self.length, self.rows, self.stride]
        return np.stack(columns).astype("<i8").tobytes()

    def check(self, sizes: Sequence[int], nbytes: int) -> None:
        """Raises ``TransferError`` if a block leaves its buffer or all are not ``nbytes`` together."""
        check_blocks("target", self.buffer, self.start, self.length, self.rows, self.stride, sizes)
        if self.nbytes != nbytes:
            raise TransferError(f"the pieces are {self.nbytes} bytes and {nbytes} are sent")

    @property
    def nbytes(self) -> int:
        return int((self.length * self.rows).sum())

    @property
    def packed(self) -> Int64s:
        """Where each block begins when packed."""
        sizes = self.length * self.rows
        ends: Int64s = np.cumsum(sizes)
        return ends - sizes


class Mover(Protocol):
    """Copies between a rank's buffers and packed host memory; returns when the bytes are there."""

    def gather(self, blocks: Blocks, packed: torch.Tensor) -> None:
        """Fill the beginning of ``packed``, uint8."""

    def scatter(self, blocks: Blocks, packed: torch.Tensor) -> None:
        """The other way round."""


def mover(buffers: Sequence[torch.Tensor]) -> Mover:
    """For buffers, uint8 [size], of one device."""
    return CudaMover(buffers) if buffers and buffers[0].is_cuda else CpuMover(buffers)


class CpuMover:
    """``Mover`` of buffers in this process's memory."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._addresses = np.array([each.data_ptr() for each in buffers], dtype=np.int64)

    def gather(self, blocks: Blocks, packed: torch.Tensor) -> None:
        assert blocks.nbytes <= len(packed)
        held = self._addresses[blocks.buffer] + blocks.start
        there = packed.data_ptr() + blocks.packed
        copy_blocks(held, there, blocks.length, blocks.rows, blocks.stride, blocks.length)

    def scatter(self, blocks: Blocks, packed: torch.Tensor) -> None:
        assert blocks.nbytes <= len(packed)
        held = self._addresses[blocks.buffer] + blocks.start
        there = packed.data_ptr() + blocks.packed
        copy_blocks(there, held, blocks.length, blocks.rows, blocks.length, blocks.stride)


class CudaMover:
    """``Mover`` of buffers on a GPU: indexed copies on a stream of its own, to and from pinned memory.

    Several threads may call it; they take turns.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)
        self._device = buffers[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._room = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._turn = threading.Lock()

    def gather(self, blocks: Blocks, packed: torch.Tensor) -> None:
        nbytes = blocks.nbytes
        with self._turn, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            room = self._room_for(nbytes)
            gather_indexed(self._buffers, blocks, room)
            packed[:nbytes].copy_(room[:nbytes], non_blocking=True)
            self._stream.synchronize()

    def scatter(self, blocks: Blocks, packed: torch.Tensor) -> None:
        nbytes = blocks.nbytes
        with self._turn, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            room = self._room_for(nbytes)
            room[:nbytes].copy_(packed[:nbytes], non_blocking=True)
            scatter_indexed(self._buffers, blocks, room)
            self._stream.synchronize()

    def _room_for(self, nbytes: int) -> torch.Tensor:
        """Memory of the device for packed blocks, uint8 [>= nbytes]."""
        if len(self._room) < nbytes:
            self._room = torch.empty(-(-nbytes // 4096) * 4096, dtype=torch.uint8, device=self._device)
        return self._room


def gather_indexed(buffers: Sequence[torch.Tensor], blocks: Blocks, room: torch.Tensor) -> None:
    """Pack blocks into ``room``, uint8 on the buffers' device; queued there."""
    for held, which, packed, there in _windows(buffers, blocks, room):
        packed.index_copy_(0, there, held.index_select(0, which))


def scatter_indexed(buffers: Sequence[torch.Tensor], blocks: Blocks, room: torch.Tensor) -> None:
    """The other way round."""
    for held, which, packed, there in _windows(buffers, blocks, room):
        held.index_copy_(0, which, packed.index_select(0, there))


def _windows(
    buffers: Sequence[torch.Tensor], blocks: Blocks, room: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For blocks of one buffer that look alike: windows of the buffer and which of them are meant, then the
    same of ``room``. Windows are [windows, rows, length] in the widest elements that fit."""
    packed = blocks.packed
    alike = np.stack([blocks.buffer, blocks.length, blocks.rows, blocks.stride], axis=1)
    kinds, kind_of = np.unique(alike, axis=0, return_inverse=True)
    for number, (buffer, length, rows, stride) in enumerate(kinds.tolist()):
        if not rows or not length:
            continue
        mine = np.flatnonzero(kind_of.reshape(-1) == number)
        starts, places = blocks.start[mine], packed[mine]
        common = int(np.gcd.reduce(np.concatenate([starts, places, [length, stride]])))
        unit = next(size for size in _UNITS if common % size == 0)
        yield (
            *_window(buffers[buffer], starts, rows, length, stride, unit),
            *_window(room, places, rows, length, length, unit),
        )


def _window(
    memory: torch.Tensor, starts: Int64s, rows: int, length: int, stride: int, unit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of uint8 ``memory`` at multiples of what all starts have in common, and the wanted ones."""
    first = int(starts.min())
    step = max(int(np.gcd.reduce(starts - first)), unit)
    index = (starts - first) // step
    usable = memory[: len(memory) // unit * unit].view(_UNITS[unit])
    windows = usable.as_strided(
        (int(index.max()) + 1, rows, length // unit), (step // unit, stride // unit, 1), first // unit
    )
    return windows, torch.from_numpy(index).to(memory.device)
