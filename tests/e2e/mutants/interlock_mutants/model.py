"""The mutants' networks: MiMo-V2 with one change each."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import torch

from interlock.checkpoint.source import WeightSource
from interlock.models.mimo_v2.model import MiMoV2
from interlock.moe.build import build_moe_context
from interlock.moe.experts.registry import expert_runners
from interlock.nn.context import ModelContext
from interlock.step import Step


class SmallerCapacity(MiMoV2):
    """Rank 1 dispatches through buffers that are one token smaller in decode."""

    def __init__(self, context: ModelContext) -> None:
        plan = context.plan
        if context.groups.world.rank == 1:
            plan = msgspec.structs.replace(plan, moe_decode_capacity=plan.moe_decode_capacity - 1)
        moe = build_moe_context(plan, context.groups, context.kernels, context.device)
        super().__init__(replace(context, moe=moe))
        context.moe.layers.extend(moe.layers)


class SwappedRunner(MiMoV2):
    """Experts computed by the reference runner, whatever the plan says."""

    def __init__(self, context: ModelContext) -> None:
        moe = replace(context.moe, runner=expert_runners().get("torch"))
        super().__init__(replace(context, moe=moe))


class Nothing:
    """A feed-forward layer that adds nothing."""

    takes_quantised = False

    def tell_format(self, formats: object) -> None:
        return

    def load(self, source: WeightSource, prefix: str) -> None:
        return

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


class NoExperts(MiMoV2):
    """One layer is built without its experts."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        layer = self.layers[-1]
        assert layer.experts is not None
        context.moe.layers.remove(layer.experts)
        layer.experts = None
        layer._mlp = Nothing()  # type: ignore[assignment]


class SkipsALayer(MiMoV2):
    """One layer has experts and never calls them."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        layer = self.layers[-1]
        layer._transformed = self._zero  # type: ignore[method-assign]

    @staticmethod
    def _zero(
        attended: torch.Tensor, residual: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(attended), attended + residual


class SlowToLoad(MiMoV2):
    """Rank 1 reads its weights for seconds longer than the others, as from a slow disk."""

    def load(self, checkpoint: WeightSource) -> None:
        if self.context.groups.world.rank == 1:
            time.sleep(5)
        super().load(checkpoint)
