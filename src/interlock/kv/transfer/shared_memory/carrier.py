"""Staging memory that receivers on the same host map: nothing is moved until it is scattered."""

from __future__ import annotations

import msgspec
import torch

from interlock.kv.transfer.base import TransferError
from interlock.kv.transfer.shared_memory.memory import Mapped, Pools, SharedPools
from interlock.kv.transfer.staged.pinned import pin, unpin


class SharedSource:
    """``SourceCarrier``."""

    def __init__(self) -> None:
        self._pools = SharedPools()
        self._memory: list[torch.Tensor] = []

    def open(self, nbytes: int) -> torch.Tensor:
        self._memory = self._pools.allocate([nbytes])
        return self._memory[0]

    def description(self) -> bytes:
        return msgspec.msgpack.encode(self._pools.describe(self._memory))

    def close(self) -> None:
        self._pools.close()


class SharedTarget:
    """``TargetCarrier``.

    Args:
        pinned: page-lock what is mapped, for a GPU.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def reach(self, description: bytes, nbytes: int) -> SharedLanding:
        try:
            mapped = Mapped(msgspec.msgpack.decode(description, type=Pools))
        except msgspec.DecodeError as error:
            raise TransferError(f"the prefill server describes its memory in another way: {error}") from None
        if mapped.sizes != (nbytes,):
            raise TransferError("the prefill server's staging memory has another size than it says")
        if self._pinned:
            pin(mapped.buffers[0])
        return SharedLanding(mapped.buffers[0], pinned=self._pinned)

    def close(self) -> None:
        return


class SharedLanding:
    """``Landing``: the sender's memory itself."""

    def __init__(self, memory: torch.Tensor, *, pinned: bool) -> None:
        self._memory = memory
        self._pinned = pinned

    def fetch(self, start: int, nbytes: int) -> torch.Tensor:
        return self._memory[start : start + nbytes]

    def close(self) -> None:
        if self._pinned:
            unpin(self._memory)
            self._pinned = False
