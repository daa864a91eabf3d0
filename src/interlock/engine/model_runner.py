"""What a rank computes with: kernels, model, KV cache and dispatcher, built from the plan."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, replace

import torch

from interlock.checkpoint.open import open_checkpoint
from interlock.checkpoint.source import WeightSource
from interlock.engine.batch import StepArrays, prompt_row_blocks, to_step
from interlock.engine.decode_graphs import DecodeGraphs, DecodeOutput
from interlock.engine.receipts import observe_runner
from interlock.engine.recorder import recorded
from interlock.engine.start_clock import StartClock
from interlock.engine.step_buffers import Space, StepBuffers
from interlock.engine.upload import upload
from interlock.engine.warm_up import warm_up_phases
from interlock.kernels.base import CompileShare
from interlock.kernels.registry import get_kernels
from interlock.kv.cache import KVCache, Storage, allocate
from interlock.models.registry import model_families
from interlock.moe.build import build_moe_context
from interlock.nn.attention_backends.registry import build_attention
from interlock.nn.context import ModelContext
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan
from interlock.plugins import load_symbol
from interlock.step import Step


class ModelRunner:
    """One rank's model. Built in the order buffers, weights, KV pools, so that sizes come from the plan.

    Args:
        plan: the launch plan.
        groups: the groups of this rank.
        clock: is told what the start takes.
    """

    def __init__(self, plan: LaunchPlan, groups: Groups, clock: StartClock | None = None) -> None:
        self.plan = plan
        self.groups = groups
        self.clock = clock or StartClock()
        self.device = torch.device(plan.device)
        self.kernels = get_kernels(plan.kernels, threads=plan.threads)
        self._compiler = self.kernels.compiler(_share_of_compiling(plan, groups.world.rank))
        self.context = ModelContext(
            plan=plan,
            kernels=self.kernels,
            attention=build_attention(plan.attention_backend, self.kernels),
            groups=groups,
            device=self.device,
            dtype=getattr(torch, plan.dtype),
            moe=build_moe_context(plan, groups, self.kernels, self.device),
        )
        self.model = load_symbol(model_families()[plan.model_family].model)(self.context)
        self.source: WeightSource | None = None
        self.cache: KVCache | None = None
        self.graphs: DecodeGraphs | None = None
        self.clock.mark("building")

    def load(self, storage: Storage | None = None) -> None:
        """Read or make the weights, then reserve the KV pools, in ``storage`` where one is given."""
        with closing(open_checkpoint(self.plan)) as source:
            self.source = source
            self.model.load(source)
        self.cache = allocate(self.plan, self.device, storage)
        self.clock.mark("weights")

    def warm_up(self) -> None:
        """Run one step of each phase through every layer; writes only to pages that nobody owns yet.

        Then capture the decode steps that the plan wants as CUDA graphs.
        """
        sizes = self.plan.cuda_graph_sizes
        if sizes:
            space = Space(full=self.plan.full_pages > 0, window=self.plan.window_pages > 0)
            buffers = StepBuffers(max(sizes), self.plan.sequence_pages, space, self.device)
            self.graphs = DecodeGraphs(sizes, self._forward, self.logits, buffers)
        if self._compiler is not None:
            report = self._compiler.compile_ahead(self._run_once)
            self._compiler.close()
            self.clock.tell(compiled=asdict(report))
            self.clock.mark("compiling")
        self._run_once()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.mark("first steps")
        if self.graphs is not None:
            self.graphs.capture()
            self.clock.mark("capturing")

    def _run_once(self) -> None:
        """Every kind of step once. Full chunks come first: their kernels compile for longest."""
        small, *large = warm_up_phases(self.plan, self.device)
        for steps in (*large, small):
            self._run(steps)
        if self.graphs is not None:
            self.graphs.run_once()

    def _run(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self.logits(self._forward(step)[-1:])

    def replay(self, arrays: StepArrays, tokens: torch.Tensor | None = None) -> DecodeOutput | None:
        """A decode step as a CUDA graph; None where it must run eagerly. See ``DecodeGraphs.replay``."""
        replayed = None if self.graphs is None else self.graphs.replay(arrays, tokens)
        if replayed is not None:
            self.context.moe.meter.count_replay(arrays.phase, arrays.live_tokens)
        return replayed

    def forward(self, arrays: StepArrays, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [n, h] of one step, after the final norm.

        Args:
            tokens: int64 [n] on the device, in place of ``arrays.token_ids``.
        """
        step = to_step(arrays, self.device)
        if tokens is not None:
            step = replace(step, token_ids=tokens)
        if arrays.inspection:
            with recorded(self.model, self.groups, step, arrays.inspection):
                return self._forward(step)
        return self._forward(step)

    def follow(self, arrays: StepArrays) -> None:
        """Take part in a step whose tokens the replica's leader samples: its forward and all its logits."""
        if self.replay(arrays) is not None:
            return
        hidden = self.forward(arrays)
        for rows in prompt_row_blocks(arrays):
            self.logits(hidden[upload(rows, self.device)])
        if len(arrays.sample_rows):
            self.logits(hidden[upload(arrays.sample_rows, self.device)])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h] -> float32 logits [m, vocabulary], on every attention-TP rank."""
        logits: torch.Tensor = self.model.logits(hidden)
        return logits

    def receipts(self) -> dict[str, object]:
        """Plan item -> what this rank really built and did."""
        return observe_runner(self)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
        self.context.moe.close()

    def _forward(self, step: Step) -> torch.Tensor:
        self.context.moe.meter.begin_step(step.phase, step.live_tokens)
        hidden: torch.Tensor = self.model.forward(step, self.cache)
        return hidden


def _share_of_compiling(plan: LaunchPlan, rank: int) -> CompileShare:
    """This process's cores, shared with the other ranks of the node; more than 32 would have little to do."""
    ranks = plan.tp_size // plan.nnodes
    cores = len(os.sched_getaffinity(0)) // ranks
    return CompileShare(processes=max(1, min(32, cores)), rank=rank % ranks, ranks=ranks)
