"""The memory of one rank as the rows that a runner takes."""

from __future__ import annotations

import torch

from interlock.moe.a2a.rows import ContiguousRows, MaskedRows
from interlock.moe.a2a.symmetric.exchange import Arrived, Exchange


def masked_rows(
    exchange: Exchange,
    arrived: Arrived,
    slab_rows: int,
    dtype: torch.dtype,
    results: torch.Tensor | None = None,
) -> MaskedRows:
    """Every local expert's first ``slab_rows`` rows, of which ``arrived.counts`` are filled.

    ``results`` [at least L * M, h]: where they may be left.
    """
    local = arrived.counts.shape[0]
    total = local * slab_rows
    scales = exchange.scales
    return MaskedRows(
        rows=exchange.rows[:total].view(dtype).view(local, slab_rows, -1),
        counts=arrived.counts,
        weights=exchange.weights[:total].view(local, slab_rows),
        scales=None if scales is None else scales[:total].view(local, slab_rows, -1),
        results=None if results is None else results[:total].view(local, slab_rows, -1),
    )


def contiguous_rows(
    exchange: Exchange, arrived: Arrived, total: int, alignment: int, dtype: torch.dtype
) -> ContiguousRows:
    """``total`` rows in segments that start at multiples of ``alignment``."""
    scales = exchange.scales
    return ContiguousRows(
        rows=exchange.rows[:total].view(dtype),
        psum=arrived.psum,
        counts=arrived.counts,
        alignment=alignment,
        weights=exchange.weights[:total],
        scales=None if scales is None else scales[:total],
    )
