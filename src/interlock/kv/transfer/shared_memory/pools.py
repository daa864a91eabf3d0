"""Both ends of ``shared_memory``: straight into the other's pools on a CPU, through staging on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from interlock.kv.transfer.base import KVReceiver, Pieces, TransferError
from interlock.kv.transfer.blocks import copy_blocks
from interlock.kv.transfer.shared_memory.carrier import SharedSource, SharedTarget
from interlock.kv.transfer.shared_memory.memory import Mapped, Pools, SharedPools
from interlock.kv.transfer.staged.channel import Where
from interlock.kv.transfer.staged.receiver import StagedReceiver
from interlock.kv.transfer.staged.sender import StagedSender

TIMEOUT = 30.0
DIRECT_SETTLE_SECONDS = 2.0
"""For a copy that had begun when its sender was told to stop."""


class SharedReceiver:
    """``KVReceiver``; see ``base``."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        self._host = host
        self._timeout = timeout
        self._pools = SharedPools()
        self._staged: KVReceiver | None = None

    @property
    def settle_seconds(self) -> float:
        return DIRECT_SETTLE_SECONDS if self._staged is None else self._staged.settle_seconds

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return self._pools.allocate(sizes)

    def register(self, buffers: Sequence[torch.Tensor]) -> bytes:
        if not buffers[0].is_cuda:
            return msgspec.msgpack.encode(self._pools.describe(buffers))
        self._staged = StagedReceiver(SharedTarget(pinned=True), self._host, timeout=self._timeout)
        return self._staged.register(buffers)

    def close(self) -> None:
        if self._staged is not None:
            self._staged.close()
        self._pools.close()


class SharedSender:
    """``KVSender``; see ``base``."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._buffers: list[torch.Tensor] = []
        self._mapped: dict[int, Mapped] = {}
        self._through: dict[int, int] = {}
        self._staged: StagedSender | None = None
        self._next = 0

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = list(buffers)

    def connect(self, description: bytes, sizes: Sequence[int]) -> int:
        try:
            where = msgspec.msgpack.decode(description, type=Pools | Where)
        except msgspec.DecodeError as error:
            raise TransferError(f"the decode server describes its memory in another way: {error}") from None
        if where.sizes != tuple(sizes):
            raise TransferError("the decode server's pools have other sizes than its layout says")
        if isinstance(where, Pools):
            if self._buffers[0].is_cuda:
                raise TransferError(
                    "--device: the prefill server's pages are on a GPU and the decode server's are not"
                )
            self._next += 1
            self._mapped[self._next] = Mapped(where)
        else:
            number = self._through_staging().connect(description, sizes)
            self._next += 1
            self._through[self._next] = number
        return self._next

    def write(self, receiver: int, pieces: Pieces) -> None:
        mapped = self._mapped.get(receiver)
        if mapped is None:
            self._through_staging().write(self._through[receiver], pieces)
            return
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

    def cut(self, receiver: int) -> None:
        if self._staged is not None and receiver in self._through:
            self._staged.cut(self._through[receiver])

    def disconnect(self, receiver: int) -> None:
        self._mapped.pop(receiver, None)
        number = self._through.pop(receiver, None)
        if self._staged is not None and number is not None:
            self._staged.disconnect(number)

    def close(self) -> None:
        self._mapped.clear()
        if self._staged is not None:
            self._staged.close()
            self._staged = None
        self._buffers = []

    def _through_staging(self) -> StagedSender:
        if self._staged is None:
            self._staged = StagedSender(SharedSource(), timeout=self._timeout)
            self._staged.register(self._buffers)
        return self._staged
