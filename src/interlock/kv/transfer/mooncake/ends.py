"""Both ends of ``mooncake``: staged transfers whose receiver reads with the Mooncake transfer engine.

Reads, since a read completes at the side that needs the bytes. A write over TCP completes, up to version
0.3.13, when its last bytes are in the sender's socket, and a refused one succeeds as well; newer versions
acknowledge, but only towards peers that do so too. Only staging memory is registered: the engine's port lets
anybody who reaches it read and write what is.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import torch

from interlock.errors import StartupError
from interlock.kv.transfer.base import TransferError
from interlock.kv.transfer.staged.receiver import StagedReceiver
from interlock.kv.transfer.staged.rooms import Rooms
from interlock.kv.transfer.staged.sender import StagedSender

TIMEOUT = 30.0
INFINIBAND = Path("/sys/class/infiniband")
HANDSHAKE = "P2PHANDSHAKE"
READ_BYTES = 8 << 20
READS = 2
"""At a time. The engine's own waiting call spins, which takes a core from the threads that move bytes."""

FIRST_POLL_SECONDS = 1e-4
POLL_SECONDS = 1e-3
"""Seconds between looks, doubled from the first to the last."""

TRIES = 5
"""The library keeps four connections to a peer and notices only by a failed read that one has ended."""

FAILED = "a read has failed"
PENDING, DONE = 0, 1
"""Results of ``transfer_check_status``; all others are failures."""


class MooncakeSender(StagedSender):
    """``KVSender``; see ``base``."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(MooncakeSource(host), timeout=timeout)


class MooncakeReceiver(StagedReceiver):
    """``KVReceiver``; see ``base``."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(MooncakeTarget(host, timeout), host, timeout=timeout)


class _Where(msgspec.Struct, frozen=True, kw_only=True):
    """Staging memory: the engine that serves it ("host:port"), its address there, its size."""

    engine: str
    address: int
    nbytes: int


def protocol(infiniband: Path = INFINIBAND) -> str:
    """ "rdma" where the machine has an RDMA device, else "tcp"."""
    try:
        return "rdma" if any(infiniband.iterdir()) else "tcp"
    except OSError:
        return "tcp"


def start_engine(host: str) -> Any:
    """A transfer engine of this process, reached at ``host``.

    Raises:
        StartupError: it cannot be loaded or does not start.
    """
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise StartupError(
            f"the Mooncake transfer engine cannot be loaded: {error} (pip install "
            "mooncake-transfer-engine-non-cuda, and apt-get install libibverbs1)"
        ) from None
    engine = TransferEngine()
    chosen = protocol()
    status = engine.initialize(host, HANDSHAKE, chosen, "")
    if status != 0:
        raise StartupError(f"the Mooncake transfer engine does not start over {chosen} at {host}: {status}")
    return engine


def register(engine: Any, memory: torch.Tensor) -> None:
    """Raises ``TransferError``."""
    status = engine.register_memory(memory.data_ptr(), memory.nbytes)
    if status != 0:
        raise TransferError(f"Mooncake does not register {memory.nbytes} bytes of staging memory: {status}")


class MooncakeSource:
    """``SourceCarrier``."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._engine: Any = None
        self._memory: torch.Tensor | None = None

    def open(self, nbytes: int) -> torch.Tensor:
        self._engine = start_engine(self._host)
        self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        register(self._engine, self._memory)
        return self._memory

    def description(self) -> bytes:
        assert self._memory is not None
        where = _Where(
            engine=f"{self._host}:{self._engine.get_rpc_port()}",
            address=self._memory.data_ptr(),
            nbytes=self._memory.nbytes,
        )
        return msgspec.msgpack.encode(where)

    def close(self) -> None:
        if self._engine is not None and self._memory is not None:
            self._engine.unregister_memory(self._memory.data_ptr())
        self._engine = None


class MooncakeTarget:
    """``TargetCarrier``."""

    def __init__(self, host: str, timeout: float) -> None:
        self._timeout = timeout
        self._engine: Any = start_engine(host)
        self._retired: list[object] = []

    def reach(self, description: bytes, nbytes: int) -> MooncakeLanding:
        try:
            where = msgspec.msgpack.decode(description, type=_Where)
        except msgspec.DecodeError as error:
            raise TransferError(f"the prefill server describes its memory in another way: {error}") from None
        if where.nbytes != nbytes:
            raise TransferError("the prefill server's staging memory has another size than it says")
        return MooncakeLanding(self._engine, where, self._timeout, self._retired)

    def close(self) -> None:
        """Ends the engine's threads here and now: they may not be left to the end of the process."""
        self._engine = None


class MooncakeLanding:
    """``Landing``: one sender's memory, read into memory of this process."""

    def __init__(self, engine: Any, where: _Where, timeout: float, retired: list[object]) -> None:
        self._engine = engine
        self._where = where
        self._timeout = timeout
        self._rooms = Rooms(
            lambda memory: register(engine, memory),
            lambda memory, _: engine.unregister_memory(memory.data_ptr()),
            retired,
        )

    def fetch(self, start: int, nbytes: int) -> torch.Tensor:
        memory = self._rooms.next(nbytes)
        deadline = time.monotonic() + self._timeout
        for _ in range(TRIES):  # a late read of an earlier try would bring the same bytes
            problem = self._read(memory, self._where.address + start, deadline)
            if problem != FAILED:
                break
        if problem:
            self._rooms.retire()
            raise TransferError(f"Mooncake, {nbytes} bytes from {self._where.engine}: {problem}")
        return memory

    def close(self) -> None:
        self._rooms.close()

    def _read(self, memory: torch.Tensor, source: int, deadline: float) -> str:
        """Fill ``memory`` from an address of the sender; returns what went wrong, or ""."""
        offsets = range(0, memory.nbytes, READ_BYTES)
        waiting = deque((offset, min(READ_BYTES, memory.nbytes - offset)) for offset in offsets)
        running: list[int] = []
        pause = FIRST_POLL_SECONDS
        while waiting or running:
            while waiting and len(running) < READS:
                offset, size = waiting.popleft()
                read = self._engine.batch_transfer_async_read(
                    self._where.engine, [memory.data_ptr() + offset], [source + offset], [size]
                )
                if not read:
                    return "a read cannot begin"
                running.append(read)
            states = [(read, self._engine.transfer_check_status(read)) for read in running]
            running = [read for read, state in states if state == PENDING]
            if any(state not in (PENDING, DONE) for _, state in states):
                return FAILED
            if time.monotonic() > deadline:
                return f"no answer within {self._timeout:g} s"
            if running:
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)
        return ""
