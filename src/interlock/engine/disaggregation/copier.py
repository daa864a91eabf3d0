"""What one rank of a prefill replica does of a transfer: maps the pools of decode replicas, copies pages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from interlock.engine.disaggregation.wire import Copy, Done
from interlock.errors import InterlockError
from interlock.kv.transfer.base import KVSender
from interlock.kv.transfer.copies import CopyPlanner, Span
from interlock.kv.transfer.layout import CacheLayout


class Copier:
    """One rank. All calls but ``cut`` come from one worker thread.

    Args:
        layout: of this replica's cache; ``rank`` is this rank's number within it.
    """

    def __init__(
        self, sender: KVSender, layout: CacheLayout, rank: int, buffers: Sequence[torch.Tensor]
    ) -> None:
        self._sender = sender
        self._layout = layout
        self._rank = rank
        self._targets: dict[int, list[tuple[int, CopyPlanner]]] = {}
        self._cut: set[int] = set()
        sender.register(buffers)

    def open(self, target: int, layout: CacheLayout, ranks: Sequence[bytes]) -> Done:
        """Map the pools of those ranks of a decode replica that need heads of this rank."""
        reached: list[tuple[int, CopyPlanner]] = []
        try:
            for number, description in enumerate(ranks):
                planner = CopyPlanner(self._layout, layout, sender=self._rank, receiver=number)
                if not planner.is_empty:
                    reached.append((self._sender.connect(description, layout.sizes()), planner))
        except InterlockError as error:
            for receiver, _ in reached:
                self._sender.disconnect(receiver)
            return Done(job=target, rank=self._rank, error=str(error))
        self._targets[target] = reached
        return Done(job=target, rank=self._rank)

    def copy(self, job: Copy) -> Done:
        """Write pages; all bytes have arrived when this returns without an error."""
        begun = time.monotonic()
        nbytes = 0
        try:
            if job.target not in self._targets:
                raise InterlockError("the decode server is gone")
            full = _span(job.start, job.end, job.source_full, job.target_full)
            window = _span(job.window_start, job.end, job.source_window, job.target_window)
            for receiver, planner in self._targets[job.target]:
                if job.target in self._cut:
                    raise InterlockError("the decode server is gone")
                pieces = planner.pieces(full, window)
                nbytes += pieces.nbytes
                if len(pieces):
                    self._sender.write(receiver, pieces)
        except InterlockError as error:
            return Done(job=job.job, rank=self._rank, error=str(error))
        except Exception as error:
            return Done(job=job.job, rank=self._rank, error=f"{type(error).__name__}: {error}")
        return Done(job=job.job, rank=self._rank, nbytes=nbytes, seconds=time.monotonic() - begun)

    def cut(self, target: int) -> None:
        """From now on nothing more is begun for this target; any thread may say so."""
        self._cut.add(target)
        for receiver, _ in self._targets.get(target, ()):
            self._sender.cut(receiver)

    def close_target(self, target: int) -> None:
        self._cut.discard(target)
        for receiver, _ in self._targets.pop(target, ()):
            self._sender.disconnect(receiver)

    def close(self) -> None:
        for target in list(self._targets):
            self.close_target(target)
        self._sender.close()


def _span(start: int, end: int, source: tuple[int, ...], target: tuple[int, ...]) -> Span:
    return Span(start, end, np.array(source, dtype=np.int32), np.array(target, dtype=np.int32))
