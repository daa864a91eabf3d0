"""What a rank and the process that compiles for it say to each other: one JSON object a line."""

from __future__ import annotations

import heapq
import zlib

import msgspec

from interlock.kernels.base import CompileShare

SLOWEST_FIRST = ("pipelined_attention_kernel", "tiles_kernel", "pipelined_kernel", "attention_kernel")
"""Kernels that compile for longest (4.1 to 1.5, 1.2, 1 and 0.9 CPU seconds, others 0.1 to 0.6 each)."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One specialisation of one kernel.

    Attributes:
        number: the caller's, unique.
        module, name: where the kernel is found.
        specialisation: as ``JITFunction.preload`` takes it.
        source_key: the caller's hash of the kernel's source. Triton's depends on which functions that a
            kernel calls were hashed before it, so the compiling process must not make its own.
        target: backend, architecture and warp size, such as ("cuda", 90, 32).
    """

    number: int
    module: str
    name: str
    specialisation: str
    source_key: str
    target: tuple[str, int, int]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A job has ended, and its kernel is in Triton's cache on disk.

    Attributes:
        seconds: from its start to its end; ``cpu_seconds`` with the assembler's.
        error: why there is no kernel, or "".
    """

    number: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    error: str = ""


class Queue:
    """Jobs that wait: this rank's part before the other ranks', those that take longest first, then in order
    of arrival, so that no long one is left over for the end, when the other processes have nothing to do."""

    def __init__(self, share: CompileShare) -> None:
        self._share = share
        self._waiting: list[tuple[bool, int, int, Job]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: Job) -> None:
        base = job.name.rpartition(".")[2]
        place = SLOWEST_FIRST.index(base) if base in SLOWEST_FIRST else len(SLOWEST_FIRST)
        heapq.heappush(self._waiting, (not self._owns(job), place, self._arrived, job))
        self._arrived += 1

    def take(self) -> Job:
        """The next job. Raises IndexError when none waits."""
        return heapq.heappop(self._waiting)[-1]

    def _owns(self, job: Job) -> bool:
        """Of equal jobs on different ranks, one is owned."""
        named = f"{job.module}.{job.name} {job.specialisation}"
        return zlib.crc32(named.encode()) % self._share.ranks == self._share.rank
