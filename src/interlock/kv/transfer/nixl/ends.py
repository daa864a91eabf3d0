"""Both ends of ``nixl``: staged transfers whose receiver reads with a NIXL agent over UCX."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import msgspec
import torch

from interlock.errors import StartupError
from interlock.kv.transfer.base import TransferError
from interlock.kv.transfer.staged.receiver import StagedReceiver
from interlock.kv.transfer.staged.rooms import Rooms
from interlock.kv.transfer.staged.sender import StagedSender

TIMEOUT = 30.0
PLUGIN = "UCX"
HOST_MEMORY = "DRAM"
POLL_SECONDS = 1e-4
_log = logging.getLogger("interlock.disaggregation")


class NixlSender(StagedSender):
    """``KVSender``; see ``base``."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(NixlSource(), timeout=timeout)


class NixlReceiver(StagedReceiver):
    """``KVReceiver``; see ``base``."""

    def __init__(self, host: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(NixlTarget(timeout), host, timeout=timeout)


class _Where(msgspec.Struct, frozen=True, kw_only=True):
    """Staging memory: metadata of the agent that serves it, its address there, its size."""

    metadata: bytes
    address: int
    nbytes: int


def start_agent(role: str) -> Any:
    """A NIXL agent of this process with a name of its own.

    Raises:
        StartupError: it cannot be loaded or does not start.
    """
    try:
        from nixl_cu13._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise StartupError(f"NIXL cannot be loaded: {error} (pip install nixl-cu13)") from None
    library = logging.getLogger("nixl")
    library.handlers.clear()  # it writes to standard output; its lines belong in our log
    library.propagate = True
    name = f"interlock-{role}-{secrets.token_hex(8)}"
    try:
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # one agent serves a thread for each sender
        return nixl_agent(name, nixl_agent_config(backends=[PLUGIN], sync_mode=strict))
    except Exception as error:
        raise StartupError(f"NIXL does not start with its {PLUGIN} plugin: {error}") from None


def register(agent: Any, memory: torch.Tensor) -> Any:
    """Raises ``TransferError``."""
    try:
        return agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], mem_type=HOST_MEMORY)
    except Exception as error:
        raise TransferError(f"NIXL does not register {memory.nbytes} bytes: {error}") from None


class NixlSource:
    """``SourceCarrier``."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._memory: torch.Tensor | None = None
        self._registered: Any = None

    def open(self, nbytes: int) -> torch.Tensor:
        self._agent = start_agent("prefill")
        self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._registered = register(self._agent, self._memory)
        return self._memory

    def description(self) -> bytes:
        assert self._memory is not None
        where = _Where(
            metadata=self._agent.get_agent_metadata(),
            address=self._memory.data_ptr(),
            nbytes=self._memory.nbytes,
        )
        return msgspec.msgpack.encode(where)

    def close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._registered = self._agent = None


class NixlTarget:
    """``TargetCarrier``."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._agent: Any = start_agent("decode")
        self._retired: list[object] = []

    def reach(self, description: bytes, nbytes: int) -> NixlLanding:
        try:
            where = msgspec.msgpack.decode(description, type=_Where)
        except msgspec.DecodeError as error:
            raise TransferError(f"the prefill server describes its memory in another way: {error}") from None
        if where.nbytes != nbytes:
            raise TransferError("the prefill server's staging memory has another size than it says")
        try:
            peer = self._agent.add_remote_agent(where.metadata)
        except Exception as error:
            raise TransferError(f"NIXL cannot reach the prefill server: {error}") from None
        name = peer.decode() if isinstance(peer, bytes) else str(peer)
        return NixlLanding(self._agent, name, where, self._timeout, self._retired)

    def close(self) -> None:
        self._agent = None


class NixlLanding:
    """``Landing``: one sender's memory, read into memory of this process. ``peer``: the sender's agent."""

    def __init__(self, agent: Any, peer: str, where: _Where, timeout: float, retired: list[object]) -> None:
        self._agent = agent
        self._peer = peer
        self._where = where
        self._timeout = timeout
        self._rooms = Rooms(
            lambda memory: register(agent, memory),
            lambda _, registered: agent.deregister_memory(registered),
            retired,
        )

    def fetch(self, start: int, nbytes: int) -> torch.Tensor:
        memory = self._rooms.next(nbytes)
        mine, theirs = (
            self._agent.get_xfer_descs([(address, nbytes, 0)], mem_type=HOST_MEMORY)
            for address in (memory.data_ptr(), self._where.address + start)
        )
        handle: Any = None
        try:
            handle = self._agent.initialize_xfer("READ", mine, theirs, self._peer)
            state = self._finish(handle)
        except Exception as error:
            state = f"{type(error).__name__}: {error}"
        if state != "DONE":
            self._rooms.retire(handle)
            raise TransferError(f"NIXL, {nbytes} bytes from {self._peer}: {state}")
        self._agent.release_xfer_handle(handle)
        return memory

    def close(self) -> None:
        self._rooms.close()
        try:
            self._agent.remove_remote_agent(self._peer)
        except Exception as error:
            _log.info("NIXL, leaving %s: %s", self._peer, error)

    def _finish(self, handle: Any) -> str:
        """The state in which a read ends."""
        deadline = time.monotonic() + self._timeout
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                return f"no answer within {self._timeout:g} s"
            time.sleep(POLL_SECONDS)
            state = self._agent.check_xfer_state(handle)
        return str(state)
