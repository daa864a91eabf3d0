"""Linear layers over an attention-TP group.

Legend: n tokens, K input width, N output width, t ranks of the group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from interlock.checkpoint.source import WeightSource
from interlock.kernels.base import PackedWeight
from interlock.nn.context import ModelContext
from interlock.nn.sharding import Shard, shard


def pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows until there are ``rows``."""
    missing = rows - weight.shape[0]
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def read_row_shard(
    source: WeightSource, name: str, part: Shard, *, dtype: torch.dtype, columns: range | None = None
) -> torch.Tensor:
    """Rows of ``part``, [part.size, K]; padding rows are zero."""
    return pad_rows(source.read(name, rows=[part.live], columns=columns, dtype=dtype), part.size)


class ColumnParallelLinear:
    """x [n, K] -> this rank's output columns [n, N / t]. No communication.

    The weight may be a stack of several ([gate; up], [q; k; v]); whoever loads it cuts it.
    """

    def __init__(self, context: ModelContext) -> None:
        self._kernels, self._device = context.kernels, context.device
        self._weight: PackedWeight | None = None

    def load(self, weight: torch.Tensor) -> None:
        """weight [N / t, K] of this rank."""
        self._weight = self._kernels.pack_linear(weight.to(self._device))

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    @property
    def _packed(self) -> PackedWeight:
        assert self._weight is not None, "load() comes before the first forward"
        return self._weight

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._kernels.linear(x, self._packed, out_dtype=out_dtype)


class RowParallelLinear:
    """This rank's input columns [n, K / t] -> full output [n, N] on every rank.

    Two ways with one meaning. Normally each rank multiplies its columns of the weight and the float32 partial
    sums are added over the group. In deterministic mode the input is gathered instead and each rank computes
    some output columns over the whole K, so the order of the sum, and its bits, do not depend on t.
    """

    def __init__(self, context: ModelContext, *, in_features: int, out_features: int) -> None:
        self._kernels = context.kernels
        self._group = context.groups.attn_tp
        self._dtype, self._device = context.dtype, context.device
        self._in_features, self._out_features = in_features, out_features
        self._gathers_input = context.plan.deterministic and self._group.size > 1
        self._weight: PackedWeight | None = None

    @property
    def is_deterministic(self) -> bool:
        """Whether the bits of the output do not depend on the size of the group."""
        return self._kernels.row_invariant and (self._gathers_input or self._group.size == 1)

    def load(self, source: WeightSource, name: str) -> None:
        """Read this rank's part of the weight [N, K]."""
        rank, size = self._group.rank, self._group.size
        if self._gathers_input:
            part = shard(self._out_features, size, rank)
            weight = read_row_shard(source, name, part, dtype=self._dtype)
        else:
            part = shard(self._in_features, size, rank)
            weight = source.read(name, columns=part.live, dtype=self._dtype)
            weight = F.pad(weight, (0, part.padding)) if part.padding else weight
        self._weight = self._kernels.pack_linear(weight.to(self._device))

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    @property
    def _packed(self) -> PackedWeight:
        assert self._weight is not None, "load() comes before the first forward"
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return self._kernels.linear(x, self._packed)
        if self._gathers_input:
            whole = self._group.all_gather(x.contiguous(), dim=1)[:, : self._in_features]
            columns = self._kernels.linear(whole, self._packed)
            return self._group.all_gather(columns, dim=1)[:, : self._out_features]
        partial = self._kernels.linear(x, self._packed, out_dtype=torch.float32)
        return self._group.all_reduce(partial).to(x.dtype)
