"""Pools in memory without a name: nothing leaks when a server dies, and no size of /dev/shm bounds them."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from interlock.errors import StartupError
from interlock.kv.transfer.base import Pieces, TransferError
from interlock.kv.transfer.blocks import copy_blocks

ALIGNMENT = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 16


class _Where(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver's memory: file ``descriptor`` of process ``pid``, which begins with ``token``."""

    boot: str
    pid: int
    descriptor: int
    token: bytes
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def _boot_id() -> str:
    return _BOOT.read_text(encoding="ascii").strip()


class SharedReceiver:
    """``KVReceiver``; see ``base``."""

    def __init__(self, host: str) -> None:
        self._descriptor = -1
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._starts: tuple[int, ...] = ()
        self._buffers: list[torch.Tensor] = []

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        if self._descriptor >= 0:
            raise TransferError("the pools of a receiver are allocated once")
        starts, end = [], ALIGNMENT
        for size in sizes:
            starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._descriptor = os.memfd_create("interlock-kv", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, end)
        except OSError as error:
            raise StartupError(
                f"{end} bytes of shared memory cannot be had: {error}; lower --kv-memory"
            ) from None
        memory = mmap.mmap(self._descriptor, end)
        memory[:_TOKEN_BYTES] = self._token
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._starts = tuple(starts)
        self._buffers = [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return list(self._buffers)

    def register(self, buffers: Sequence[torch.Tensor]) -> bytes:
        mine = [(buffer.data_ptr(), buffer.nbytes) for buffer in self._buffers]
        if not mine or [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers] != mine:
            raise TransferError("only buffers that the receiver has allocated can be shared")
        where = _Where(
            boot=_boot_id(),
            pid=os.getpid(),
            descriptor=self._descriptor,
            token=self._token,
            starts=self._starts,
            sizes=tuple(buffer.nbytes for buffer in self._buffers),
        )
        return msgspec.msgpack.encode(where)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._buffers = []


class _Mapped:
    """A receiver's memory in this process."""

    def __init__(self, where: _Where) -> None:
        path = f"/proc/{where.pid}/fd/{where.descriptor}"
        problem = f"the decode server's process {where.pid} cannot be reached through shared memory"
        if where.boot != _boot_id():
            raise TransferError(f"{problem}: it runs on another host (use a transfer backend over a network)")
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(
                f"{problem}: {error.strerror}; both servers must run as one user in one process namespace"
            ) from None
        try:
            end = max((a + b for a, b in zip(where.starts, where.sizes, strict=True)), default=0)
            held = os.fstat(opened).st_size
            if held < max(end, _TOKEN_BYTES) or min(where.starts, default=ALIGNMENT) < ALIGNMENT:
                raise TransferError(f"{problem}: what {path} names is not its memory")
            self._memory = mmap.mmap(opened, held)
        finally:
            os.close(opened)
        if self._memory[:_TOKEN_BYTES] != where.token:
            self._memory.close()
            raise TransferError(f"{problem}: what {path} names is not its memory")
        self.sizes = where.sizes
        self._view = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.addresses = [self._view.data_ptr() + start for start in where.starts]


class SharedSender:
    """``KVSender``; see ``base``."""

    def __init__(self, host: str) -> None:
        self._buffers: list[torch.Tensor] = []
        self._receivers: dict[int, _Mapped] = {}
        self._next = 0

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)

    def connect(self, description: bytes, sizes: Sequence[int]) -> int:
        try:
            where = msgspec.msgpack.decode(description, type=_Where)
        except msgspec.DecodeError as error:
            raise TransferError(f"the decode server describes its memory in another way: {error}") from None
        if where.sizes != tuple(sizes):
            raise TransferError("the decode server's pools have other sizes than its layout says")
        self._next += 1
        self._receivers[self._next] = _Mapped(where)
        return self._next

    def write(self, receiver: int, pieces: Pieces) -> None:
        mapped = self._receivers[receiver]
        pieces.check([buffer.nbytes for buffer in self._buffers], mapped.sizes)
        mine = np.array([buffer.data_ptr() for buffer in self._buffers], dtype=np.int64)
        theirs = np.array(mapped.addresses, dtype=np.int64)
        copy_blocks(
            mine[pieces.source_buffer] + pieces.source,
            theirs[pieces.target_buffer] + pieces.target,
            pieces.length,
            pieces.rows,
            pieces.source_stride,
            pieces.target_stride,
        )

    def disconnect(self, receiver: int) -> None:
        self._receivers.pop(receiver, None)

    def close(self) -> None:
        self._receivers.clear()
        self._buffers = []
