"""Stand-ins for the transfer libraries: they hold calls to the interface of the real ones and move bytes.

Signatures and results are those of mooncake-transfer-engine-non-cuda 0.3.13 and nixl-cu13 1.5.1.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType

import pytest

UNDER_A_READ = "memory is given up under a read"


@dataclass
class Moves:
    """What a double was asked, and what it does wrong.

    Attributes:
        calls: names in order.
        polls: looks at a read before it is over.
        fail_after: reads that succeed before all others fail.
        broken: reads that fail first, as those over connections that have ended meanwhile.
    """

    calls: list[str] = field(default_factory=list)
    polls: int = 2
    fail_after: int = 1 << 30
    broken: int = 0
    reads: int = 0


class Memory:
    """Registered ranges of one engine."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        assert type(address) is int
        assert type(size) is int
        assert size > 0
        assert address not in self.ranges, "registered twice"
        self.ranges[address] = size

    def holds(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + n for at, n in self.ranges.items())


class MooncakeDouble:
    """``mooncake.engine`` in ``sys.modules``."""

    def __init__(self, moves: Moves) -> None:
        self.engines: dict[str, Memory] = {}
        self._ports = itertools.count(15001)
        double = self

        class TransferEngine:
            def __init__(self) -> None:
                self._memory = Memory()
                self._port = 0
                self._live: dict[int, list[int]] = {}
                self._numbers = itertools.count(1)

            def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
                assert not self._port, "initialised twice"
                assert metadata == "P2PHANDSHAKE"
                assert protocol in ("tcp", "rdma")
                assert device == ""
                assert ":" not in host or host.startswith("[")
                self._port = next(double._ports)
                double.engines[f"{host}:{self._port}"] = self._memory
                moves.calls.append("initialize")
                return 0

            def get_rpc_port(self) -> int:
                assert self._port
                return self._port

            def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
                assert self._port
                self._memory.add(buffer_addr, capacity)
                moves.calls.append("register")
                return 0

            def unregister_memory(self, address: int) -> int:
                end = address + self._memory.ranges.pop(address)
                assert not any(address <= read[2] < end for read in self._live.values()), UNDER_A_READ
                moves.calls.append("unregister")
                return 0

            def batch_transfer_async_read(
                self, target: str, buffers: list[int], peers: list[int], lengths: list[int]
            ) -> int:
                assert len(buffers) == len(peers) == len(lengths) == 1, "transfer_check_status sees the first"
                remote = double.engines.get(target)
                moves.reads += 1
                if remote is None:
                    return 0
                assert self._memory.holds(buffers[0], lengths[0]), "local memory is not registered"
                number = next(self._numbers)
                good = moves.reads <= moves.fail_after and remote.holds(peers[0], lengths[0])
                if moves.broken:
                    moves.broken, good = moves.broken - 1, False
                self._live[number] = [moves.polls, int(good), buffers[0], peers[0], lengths[0]]
                return number

            def transfer_check_status(self, number: int) -> int:
                left, good, local, peer, length = self._live[number]
                if left:
                    self._live[number][0] -= 1
                    return 0
                del self._live[number]
                if not good:
                    return -1
                ctypes.memmove(local, peer, length)
                return 1

        self.module = ModuleType("mooncake.engine")
        self.module.TransferEngine = TransferEngine  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
        monkeypatch.setitem(sys.modules, "mooncake.engine", self.module)


class NixlDouble:
    """``nixl_cu13._api`` in ``sys.modules``."""

    def __init__(self, moves: Moves) -> None:
        self.agents: dict[str, Memory] = {}
        double = self

        class nixl_thread_sync_t(Enum):
            NIXL_THREAD_SYNC_NONE = 0
            NIXL_THREAD_SYNC_STRICT = 1

        class nixl_agent_config:
            def __init__(self, backends: list[str], sync_mode: object) -> None:
                assert sync_mode == nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT, "threads share an agent"
                self.backends = backends

        class nixl_agent:
            def __init__(self, name: str, config: nixl_agent_config) -> None:
                assert config.backends == ["UCX"]
                assert name not in double.agents, "names of agents must differ"
                self._name, self._memory = name, Memory()
                self._known: set[str] = set()
                self._live: dict[int, list[int]] = {}
                double.agents[name] = self._memory
                moves.calls.append("initialize")

            def register_memory(
                self, regions: list[tuple[int, int, int, str]], mem_type: str
            ) -> list[tuple[int, int, int, str]]:
                assert mem_type == "DRAM"
                for address, size, device, label in regions:
                    assert (device, label) == (0, "")
                    self._memory.add(address, size)
                moves.calls.append("register")
                return regions

            def deregister_memory(self, regions: list[tuple[int, int, int, str]]) -> None:
                for address, size, *_ in regions:
                    del self._memory.ranges[address]
                    under = [each for each in self._live.values() if address <= each[2] < address + size]
                    assert not under, UNDER_A_READ
                moves.calls.append("unregister")

            def get_agent_metadata(self) -> bytes:
                assert self._memory.ranges, "metadata holds what is registered so far"
                return self._name.encode()

            def add_remote_agent(self, metadata: bytes) -> str:
                name = metadata.decode()
                if name not in double.agents:
                    raise RuntimeError("NIXL_ERR_BACKEND")
                self._known.add(name)
                return name

            def remove_remote_agent(self, name: str) -> None:
                self._known.remove(name)

            def get_xfer_descs(
                self, descs: list[tuple[int, int, int]], mem_type: str
            ) -> list[tuple[int, int, int]]:
                assert mem_type == "DRAM"
                assert all(len(each) == 3 for each in descs)
                return descs

            def initialize_xfer(
                self, operation: str, mine: list[tuple[int, ...]], theirs: list[tuple[int, ...]], agent: str
            ) -> int:
                assert operation == "READ"
                assert agent in self._known
                ((local, size, _),), ((peer, other, _),) = mine, theirs
                assert size == other
                assert self._memory.holds(local, size), "local memory is not registered"
                if not double.agents[agent].holds(peer, size):
                    raise RuntimeError("NIXL_ERR_NOT_FOUND")
                moves.reads += 1
                number = moves.reads
                self._live[number] = [moves.polls, number <= moves.fail_after, local, peer, size]
                return number

            def transfer(self, handle: int) -> str:
                assert handle in self._live
                return "PROC"

            def check_xfer_state(self, handle: int) -> str:
                state = self._live[handle]
                if state[0]:
                    state[0] -= 1
                    return "PROC"
                if not state[1]:
                    return "ERR"
                ctypes.memmove(*state[2:])
                return "DONE"

            def release_xfer_handle(self, handle: int) -> None:
                del self._live[handle]
                moves.calls.append("release")

        self.module = ModuleType("nixl_cu13._api")
        self.module.nixl_agent = nixl_agent  # type: ignore[attr-defined]
        self.module.nixl_agent_config = nixl_agent_config  # type: ignore[attr-defined]
        self.module.nixl_thread_sync_t = nixl_thread_sync_t  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "nixl_cu13", ModuleType("nixl_cu13"))
        monkeypatch.setitem(sys.modules, "nixl_cu13._api", self.module)
