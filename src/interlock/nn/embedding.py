"""Token embedding and output head, the vocabulary cut over the attention-TP group.

Legend: n tokens, m rows, h hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from interlock.checkpoint.source import WeightSource
from interlock.nn.context import ModelContext
from interlock.nn.linear import ColumnParallelLinear, read_row_shard
from interlock.parallel.sharding import shard


class Embedding:
    """Token ids int64 [n] -> [n, h]: each rank looks up its own ids, the sum over ranks has one live term."""

    def __init__(self, context: ModelContext, *, vocab_size: int) -> None:
        self._group = context.groups.attn_tp
        self._dtype, self._device = context.dtype, context.device
        self.part = shard(vocab_size, self._group.size, self._group.rank)
        self.weight = torch.empty(0)

    def load(self, source: WeightSource, name: str) -> None:
        self.weight = read_row_shard(source, name, self.part, dtype=self._dtype).to(self._device)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return self.weight[token_ids]
        local = token_ids - self.part.live.start
        own = (local >= 0) & (local < len(self.part.live))
        rows = self.weight[local.clamp(0, self.part.size - 1)]
        return self._group.all_reduce(rows.masked_fill_(~own[:, None], 0))


class Head:
    """Hidden rows [m, h] -> logits float32 [m, V], gathered over the group."""

    def __init__(self, context: ModelContext, *, vocab_size: int) -> None:
        self._group = context.groups.attn_tp
        self._vocab_size = vocab_size
        self._linear = ColumnParallelLinear(context)

    def load(self, weight: torch.Tensor) -> None:
        """weight [part.size, h] of this rank's part of the vocabulary."""
        self._linear.load(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._linear(hidden, out_dtype=torch.float32)
        return self._group.all_gather(logits, dim=1)[:, : self._vocab_size]
