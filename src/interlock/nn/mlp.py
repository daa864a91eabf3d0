"""Dense SwiGLU: down(silu(gate x) * up x), cut over the attention-TP group along the intermediate width."""

from __future__ import annotations

import torch

from interlock.checkpoint.source import WeightSource
from interlock.nn.context import ModelContext
from interlock.nn.linear import ColumnParallelLinear, RowParallelLinear, read_row_shard
from interlock.nn.sharding import shard


class SwiGLU:
    """x [n, h] -> [n, h]. An intermediate width that t does not divide is padded with zeros."""

    def __init__(self, context: ModelContext, *, hidden_size: int, intermediate_size: int) -> None:
        group = context.groups.attn_tp
        self._kernels, self._dtype = context.kernels, context.dtype
        self._part = shard(intermediate_size, group.size, group.rank)
        self._gate_up = ColumnParallelLinear(context)
        self._down = RowParallelLinear(context, in_features=intermediate_size, out_features=hidden_size)

    def load(self, source: WeightSource, prefix: str) -> None:
        self._gate_up.load(
            torch.cat(
                [
                    read_row_shard(source, f"{prefix}{name}_proj.weight", self._part, dtype=self._dtype)
                    for name in ("gate", "up")
                ]
            )
        )
        self._down.load(source, prefix + "down_proj.weight")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._kernels.silu_and_mul(self._gate_up(x)))
