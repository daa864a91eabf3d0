"""Linear layers over an attention-TP group.

A weight is held in its plan item's format: fp8 blocks as the checkpoint stores them (or made of a float
weight while loading), or the dtype.

Legend: n tokens, K input width, N output width, t ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from interlock.checkpoint.source import WeightSource
from interlock.kernels.base import PackedWeight, QuantisedRows, QuantisingKernels
from interlock.kernels.fp8_blocks import Fp8Blocks, stack_rows
from interlock.nn.context import ModelContext
from interlock.parallel.sharding import Shard, shard
from interlock.plan.weight_format import FP8


def pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Append zero rows until there are ``rows``."""
    missing = rows - weight.shape[0]
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def read_row_shard(
    source: WeightSource, name: str, part: Shard, *, dtype: torch.dtype, columns: range | None = None
) -> torch.Tensor:
    """Rows of ``part``, [part.size, K]; padding rows are zero."""
    return pad_rows(source.read(name, rows=[part.live], columns=columns, dtype=dtype), part.size)


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of one stored tensor, in this order, padded with zero rows to ``size``."""

    name: str
    rows: tuple[range, ...]
    size: int

    @staticmethod
    def of(name: str, part: Shard) -> WeightRows:
        return WeightRows(name, (part.live,), part.size)


@dataclass(slots=True)
class HeldFormats:
    """What linears turned out to be held in, by their packed weights.

    Attributes:
        kept: formats of weights that are stored as fp8 blocks, or that the plan quantises while loading.
        other: formats of weights that the checkpoint keeps in a float dtype.
    """

    kept: set[str]
    other: set[str]

    @property
    def observed(self) -> str:
        """The one format, as a receipt; several, which agree with no plan, where they differ."""
        return ", ".join(sorted(self.kept or self.other))


class _Holder:
    """Packs the weight of one linear in the format that the plan says.

    Args:
        context: of the model.
        weight_format: "fp8_block" or a dtype.
    """

    def __init__(self, context: ModelContext, weight_format: str) -> None:
        self._kernels, self._device, self._dtype = context.kernels, context.device, context.dtype
        self._fp8 = weight_format == FP8
        self._quantises = self._fp8 and context.plan.card.weight_format != FP8
        self._except = context.plan.card.fp8_except
        self._stored_fp8 = False
        self._weight: PackedWeight | None = None

    @property
    def packed(self) -> PackedWeight:
        assert self._weight is not None, "load() comes before the first forward"
        return self._weight

    def keeps(self, source: WeightSource, name: str) -> bool:
        """Whether the stored blocks of ``name`` are to be packed as they are."""
        return self._fp8 and source.is_fp8(name)

    def pack_blocks(self, blocks: Fp8Blocks) -> None:
        held = blocks.to(self._device)
        self._stored_fp8 = True
        self._weight = self._kernels.pack_linear_fp8(held.values, held.scales)

    def pack(self, weight: torch.Tensor, name: str, *, stored_fp8: bool = False) -> None:
        """A float weight [N, K]; quantised where the plan makes blocks of float weights."""
        weight = weight.to(self._device)
        quantises = self._quantises and name.split(".")[-2] not in self._except
        self._stored_fp8 = stored_fp8 or quantises
        pack = self._kernels.pack_linear_fp8 if quantises else self._kernels.pack_linear
        self._weight = pack(weight)

    @property
    def takes_quantised(self) -> bool:
        """Whether ``multiply`` takes rows that are quantised already."""
        return self.packed.dtype is torch.float8_e4m3fn and isinstance(self._kernels, QuantisingKernels)

    def multiply(
        self, x: torch.Tensor | QuantisedRows, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x [n, K] -> [n, N]."""
        if not isinstance(x, QuantisedRows):
            return self._kernels.linear(x, self.packed, out_dtype=out_dtype)
        assert isinstance(self._kernels, QuantisingKernels), "takes_quantised says whether these kernels can"
        return self._kernels.linear_quantised(x, self.packed, out_dtype=out_dtype)

    def tell(self, formats: HeldFormats) -> None:
        dtype = self.packed.dtype
        name = FP8 if dtype is torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
        (formats.kept if self._stored_fp8 else formats.other).add(name)


class _ParallelLinear:
    """What linears of both kinds tell of the weight that they hold."""

    def __init__(self, context: ModelContext, weight_format: str) -> None:
        self._kernels, self._device, self._dtype = context.kernels, context.device, context.dtype
        self._holder = _Holder(context, weight_format)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    @property
    def _packed(self) -> PackedWeight:
        return self._holder.packed

    def tell_format(self, formats: HeldFormats) -> None:
        """Add what the weight is held in to ``formats``."""
        self._holder.tell(formats)


class ColumnParallelLinear(_ParallelLinear):
    """x [n, K] -> this rank's output columns [n, N / t]. No communication.

    The weight may be a stack of several ([gate; up], [q; k; v]); whoever loads it cuts it.
    """

    def __init__(self, context: ModelContext, weight_format: str = "") -> None:
        super().__init__(context, weight_format)

    def load(self, weight: torch.Tensor) -> None:
        """weight [N / t, K] of this rank, which is held in its own dtype."""
        self._holder.pack(weight, "head.weight")

    def load_parts(self, source: WeightSource, parts: Sequence[WeightRows]) -> None:
        """Stack rows of several stored tensors [*, K]."""
        if self.keeps_blocks(source, [part.name for part in parts]):
            blocks = [source.read_fp8(part.name, rows=part.rows) for part in parts]
            sizes = [part.size for part in parts]
            padded = [block.padded(size, block.shape[1]) for block, size in zip(blocks, sizes, strict=True)]
            self._holder.pack_blocks(stack_rows(padded))
            return
        weights = [
            pad_rows(source.read(part.name, rows=part.rows, dtype=self._dtype), part.size) for part in parts
        ]
        stored = any(source.is_fp8(part.name) for part in parts)
        self._holder.pack(torch.cat(weights), parts[0].name, stored_fp8=stored)

    def keeps_blocks(self, source: WeightSource, names: Iterable[str]) -> bool:
        """Whether ``load_parts`` would pack the stored blocks of these tensors as they are."""
        return all(self._holder.keeps(source, name) for name in names)

    @property
    def takes_quantised(self) -> bool:
        """Whether a call takes rows that are quantised already."""
        return self._holder.takes_quantised

    def __call__(
        self, x: torch.Tensor | QuantisedRows, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._holder.multiply(x, out_dtype=out_dtype)


class RowParallelLinear(_ParallelLinear):
    """This rank's input columns [n, K / t] -> full output [n, N] on every rank.

    Two ways with one meaning. Normally each rank multiplies its columns of the weight and the float32 partial
    sums are added over the group. In deterministic mode the input is gathered instead and each rank computes
    some output columns over the whole K, so the order of the sum, and its bits, do not depend on t.
    """

    def __init__(
        self, context: ModelContext, weight_format: str = "", *, in_features: int, out_features: int
    ) -> None:
        super().__init__(context, weight_format)
        self._group = context.groups.attn_tp
        self._in_features, self._out_features = in_features, out_features
        self._gathers_input = context.plan.deterministic and self._group.size > 1

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
            if self._holder.keeps(source, name):
                blocks = source.read_fp8(name, columns=part.live)
                self._holder.pack_blocks(blocks.padded(self._out_features, part.size))
                return
            weight = source.read(name, columns=part.live, dtype=self._dtype)
            weight = F.pad(weight, (0, part.padding)) if part.padding else weight
        self._holder.pack(weight, name, stored_fp8=source.is_fp8(name))

    @property
    def takes_quantised(self) -> bool:
        """Whether a call takes rows that are quantised already; not where the input is gathered first."""
        return not self._gathers_input and self._holder.takes_quantised

    def __call__(self, x: torch.Tensor | QuantisedRows) -> torch.Tensor:
        if self._group.size == 1:
            return self._holder.multiply(x)
        if self._gathers_input:
            assert isinstance(x, torch.Tensor), "takes_quantised says that the input is gathered first"
            whole = self._group.all_gather(x.contiguous(), dim=1)[:, : self._in_features]
            columns = self._kernels.linear(whole, self._packed)
            return self._group.all_gather(columns, dim=1)[:, : self._out_features]
        partial = self._holder.multiply(x, out_dtype=torch.float32)
        return self._group.all_reduce(partial).to(x.dtype)
