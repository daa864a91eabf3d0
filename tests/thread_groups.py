"""Ranks as threads of this process, for tests of sharded layers without processes.

results = run_ranks(4, lambda groups: work(groups), attn_dp_size=2)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from interlock.parallel.topology import Groups, build_groups

Result = TypeVar("Result")


class _Meeting:
    """Where the members of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor | None] = [None] * size


class ThreadGroup:
    """A Group whose members are threads; sums are taken in rank order."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.slots)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.slots[self.rank] = tensor
        self._meeting.barrier.wait(timeout=60)
        everyone = [t.clone() for t in self._meeting.slots if t is not None]
        self._meeting.barrier.wait(timeout=60)
        return everyone

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(tensor)).sum(0).to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = self._exchange(tensor)
        assert len({part.shape for part in parts}) == 1, "all_gather needs equal shapes"
        return torch.cat(parts, dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange(tensor)[source]

    def barrier(self) -> None:
        self._meeting.barrier.wait(timeout=60)


def run_ranks(
    size: int, work: Callable[[Groups], Result], *, attn_dp_size: int = 1, ep_size: int = 1
) -> list[Result]:
    """Call ``work(groups)`` once for each rank of a world of ``size``, at the same time; results by rank.

    A rank that raises breaks the barriers, so that the others end too; its exception is raised here.
    """
    meetings: dict[tuple[int, ...], _Meeting] = {}
    lock = threading.Lock()

    def rank_main(rank: int) -> Result:
        def new_group(members: tuple[int, ...]) -> ThreadGroup:
            with lock:
                meeting = meetings.setdefault(members, _Meeting(len(members)))
            return ThreadGroup(meeting, members.index(rank) if rank in members else 0)

        groups = build_groups(
            rank=rank, tp_size=size, attn_dp_size=attn_dp_size, ep_size=ep_size, new_group=new_group
        )
        try:
            with torch.inference_mode():
                return work(groups)
        except BaseException:
            for meeting in meetings.values():
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
