"""Pools in memory without a name: nothing leaks when a server dies, and no size of /dev/shm bounds them."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from interlock.errors import StartupError
from interlock.kv.transfer.base import TransferError

ALIGNMENT = 4096
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 16


class Pools(msgspec.Struct, frozen=True, kw_only=True, tag="pools"):
    """A receiver's memory: file ``descriptor`` of process ``pid``, which begins with ``token``."""

    boot: str
    pid: int
    descriptor: int
    token: bytes
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def _boot_id() -> str:
    return _BOOT.read_text(encoding="ascii").strip()


class SharedPools:
    """Memory of this process that others on this host can map."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._starts: tuple[int, ...] = ()
        self._buffers: list[torch.Tensor] = []

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Zero-filled uint8 buffers of these sizes; once."""
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

    def describe(self, buffers: Sequence[torch.Tensor]) -> Pools:
        """Of what ``allocate`` gave. Raises ``TransferError`` for other buffers."""
        mine = [(buffer.data_ptr(), buffer.nbytes) for buffer in self._buffers]
        if not mine or [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers] != mine:
            raise TransferError("only buffers that the receiver has allocated can be shared")
        return Pools(
            boot=_boot_id(),
            pid=os.getpid(),
            descriptor=self._descriptor,
            token=self._token,
            starts=self._starts,
            sizes=tuple(buffer.nbytes for buffer in self._buffers),
        )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._buffers = []


class Mapped:
    """Another process's pools in this one. Raises ``TransferError`` where they cannot be mapped."""

    def __init__(self, where: Pools) -> None:
        path = f"/proc/{where.pid}/fd/{where.descriptor}"
        problem = f"process {where.pid} of the other server cannot be reached through shared memory"
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
        self.buffers = [
            self._view[start : start + size] for start, size in zip(where.starts, where.sizes, strict=True)
        ]
