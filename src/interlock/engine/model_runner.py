"""What a rank computes with: kernels, model, KV cache and dispatcher, built from the plan."""

from __future__ import annotations

from contextlib import closing

import torch

from interlock.checkpoint.open import open_checkpoint
from interlock.checkpoint.source import WeightSource
from interlock.engine.batch import StepArrays, prompt_row_blocks, to_step
from interlock.engine.receipts import observe_runner
from interlock.engine.recorder import recorded
from interlock.engine.step import Step
from interlock.engine.warm_up import warm_up_steps
from interlock.kernels.registry import get_kernels
from interlock.kv.cache import KVCache, allocate
from interlock.models.registry import model_families
from interlock.moe.build import build_moe_context
from interlock.nn.context import ModelContext
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan
from interlock.plugins import load_symbol


class ModelRunner:
    """One rank's model. Built in the order buffers, weights, KV pools, so that sizes come from the plan.

    Args:
        plan: the launch plan.
        groups: the groups of this rank.
    """

    def __init__(self, plan: LaunchPlan, groups: Groups) -> None:
        self.plan = plan
        self.groups = groups
        self.device = torch.device(plan.device)
        self.kernels = get_kernels(plan.kernels, threads=plan.threads)
        self.context = ModelContext(
            plan=plan,
            kernels=self.kernels,
            groups=groups,
            device=self.device,
            dtype=getattr(torch, plan.dtype),
            moe=build_moe_context(plan, groups, self.kernels, self.device),
        )
        self.model = load_symbol(model_families()[plan.model_family].model)(self.context)
        self.source: WeightSource | None = None
        self.cache: KVCache | None = None

    def load(self) -> None:
        """Read or make the weights, then reserve the KV pools."""
        with closing(open_checkpoint(self.plan)) as source:
            self.source = source
            self.model.load(source)
        self.cache = allocate(self.plan, self.device)

    def warm_up(self) -> None:
        """Run one step of each phase through every layer; writes only to pages that nobody owns yet."""
        for step in warm_up_steps(self.plan, self.device):
            hidden = self._forward(step)
            self.logits(hidden[-1:])

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        """Hidden states [n, h] of one step, after the final norm."""
        step = to_step(arrays, self.device)
        if arrays.inspection:
            with recorded(self.model, self.groups, step, arrays.inspection):
                return self._forward(step)
        return self._forward(step)

    def follow(self, arrays: StepArrays) -> None:
        """Take part in a step whose tokens the replica's leader samples: its forward and all its logits."""
        hidden = self.forward(arrays)
        for rows in prompt_row_blocks(arrays):
            self.logits(hidden[torch.from_numpy(rows)])
        if len(arrays.sample_rows):
            self.logits(hidden[torch.from_numpy(arrays.sample_rows)])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [m, h] -> float32 logits [m, vocabulary], on every attention-TP rank."""
        logits: torch.Tensor = self.model.logits(hidden)
        return logits

    def receipts(self) -> dict[str, object]:
        """Plan item -> what this rank really built and did."""
        return observe_runner(self)

    def close(self) -> None:
        self.context.moe.close()

    def _forward(self, step: Step) -> torch.Tensor:
        hidden: torch.Tensor = self.model.forward(step, self.cache)
        return hidden
