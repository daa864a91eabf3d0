"""Dense SwiGLU: down(silu(gate x) * up x), cut over the attention-TP group along the intermediate width."""

from __future__ import annotations

import torch

from interlock.checkpoint.source import WeightSource
from interlock.kernels.base import QuantisedRows, QuantisingKernels
from interlock.nn.context import ModelContext
from interlock.nn.linear import ColumnParallelLinear, HeldFormats, RowParallelLinear, WeightRows
from interlock.parallel.sharding import shard


class SwiGLU:
    """x [n, h] -> [n, h]. An intermediate width that t does not divide is padded with zeros."""

    def __init__(self, context: ModelContext, *, hidden_size: int, intermediate_size: int) -> None:
        group = context.groups.attn_tp
        self._kernels = context.kernels
        self._part = shard(intermediate_size, group.size, group.rank)
        held = context.plan.mlp_weight_format
        self._gate_up = ColumnParallelLinear(context, held)
        self._down = RowParallelLinear(context, held, in_features=intermediate_size, out_features=hidden_size)

    def load(self, source: WeightSource, prefix: str) -> None:
        self._gate_up.load_parts(
            source, [WeightRows.of(f"{prefix}{name}_proj.weight", self._part) for name in ("gate", "up")]
        )
        self._down.load(source, prefix + "down_proj.weight")

    def tell_format(self, formats: HeldFormats) -> None:
        """Add what the weights are held in to ``formats``."""
        self._gate_up.tell_format(formats)
        self._down.tell_format(formats)

    @property
    def takes_quantised(self) -> bool:
        """Whether a call takes rows that are quantised already."""
        return self._gate_up.takes_quantised

    def __call__(self, x: torch.Tensor | QuantisedRows) -> torch.Tensor:
        gate_up = self._gate_up(x)
        if self._down.takes_quantised and isinstance(self._kernels, QuantisingKernels):
            return self._down(self._kernels.silu_and_mul_quantised(gate_up))
        return self._down(self._kernels.silu_and_mul(gate_up))
