"""MiMo-V2 with ordinary MoE layers: local experts for local tokens, no dispatch, no combine."""

from __future__ import annotations

from functools import partial

import torch

from interlock.models.mimo_v2.model import MiMoV2
from interlock.moe.a2a.rows import ReplicatedRows
from interlock.moe.layer import MoELayer
from interlock.nn.context import ModelContext
from interlock.step import Step


def ordinary_forward(layer: MoELayer, hidden: torch.Tensor, step: Step) -> torch.Tensor:
    """Right on one rank, where all experts are local; elsewhere tokens lose the experts of other ranks."""
    held = layer.local_experts
    routes = layer._router.route(hidden, step.live_tokens)
    elsewhere = (routes.ids < held.start) | (routes.ids >= held.stop)
    ids = (routes.ids - held.start).masked_fill(elsewhere, -1)
    lanes = layer._runner.run(ReplicatedRows(hidden, ids, routes.weights))
    return layer._context.kernels.sum_lanes(lanes, ids, hidden.dtype)


class Forgetful(MiMoV2):
    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for layer in self.layers:
            if layer.experts is not None:
                layer.experts.forward = partial(ordinary_forward, layer.experts)  # type: ignore[method-assign]
