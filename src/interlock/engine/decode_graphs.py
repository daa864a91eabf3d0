"""Decode steps as CUDA graphs: one for each bucket of batch sizes, the whole model in each.

A batch runs in the smallest bucket that holds it. Rows behind the live ones are padding: they have no tokens
in ``query_start``, write to no slot and are routed to no expert. Everything that a graph reads or writes
exists before it is captured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from interlock.engine.batch import StepArrays
from interlock.engine.step_buffers import StepBuffers
from interlock.moe.terms import Phase
from interlock.step import Step


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """hidden [n, h]; logits float32 [n, V]; the best logit of each row float32 [n], and its id int64 [n]."""

    hidden: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor

    def rows(self, count: int) -> DecodeOutput:
        return DecodeOutput(
            self.hidden[:count], self.logits[:count], self.best[:count], self.best_ids[:count]
        )


class DecodeGraphs:
    """The captured steps of one rank.

    Args:
        sizes: buckets, ascending.
        forward: step -> hidden [n, h]; logits: hidden rows -> float32 [n, V]. Neither may synchronise.
        buffers: inputs for the largest bucket.

    Attributes:
        replays: decode steps that ran as a graph.
        misses: decode steps that were larger than the largest graph.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        forward: Callable[[Step], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        buffers: StepBuffers,
    ) -> None:
        self.sizes = tuple(sizes)
        self.replays = 0
        self.misses = 0
        self._forward, self._logits, self._buffers = forward, logits, buffers
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """Buckets that exist as graphs."""
        return tuple(sorted(self._captured))

    def run_once(self) -> None:
        """Run every bucket eagerly: kernels are compiled and libraries take their workspaces."""
        for size in self.sizes:
            self._compute(self._buffers.step(size))

    def capture(self) -> None:
        """Capture every bucket, the largest first: smaller ones fit into the memory that it has taken.

        ``run_once`` must have been called.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(self._buffers.step(self.sizes[0]))
        for size in reversed(self.sizes):
            step = self._buffers.step(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                output = self._compute(step)
            self._captured[size] = (graph, output)
        torch.cuda.synchronize()

    def replay(self, arrays: StepArrays, tokens: torch.Tensor | None) -> DecodeOutput | None:
        """Run a decode step of n sequences, or None where it must run eagerly.

        The output lies in the graph's own memory: the next replay overwrites it.

        Args:
            tokens: int64 [n] on the device, in place of ``arrays.token_ids``.
        """
        count = len(arrays.kv_len)
        if arrays.phase is not Phase.DECODE or arrays.inspection or count == 0:
            return None
        index = bisect_left(self.sizes, count)
        if index == len(self.sizes):
            self.misses += 1
            return None
        graph, output = self._captured[self.sizes[index]]
        self._buffers.fill(arrays, tokens)
        graph.replay()
        self.replays += 1
        return output.rows(count)

    def _compute(self, step: Step) -> DecodeOutput:
        hidden = self._forward(step)
        logits = self._logits(hidden)
        best = logits.max(dim=-1)
        return DecodeOutput(hidden, logits, best.values, best.indices)
