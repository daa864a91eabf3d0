"""The layouts in which dispatched rows reach the experts of a rank. No torch at import time.

Legend: n tokens of this rank, N tokens of all ranks, k experts a token, h hidden size, E experts, L experts
of this rank, R received rows, M rows an expert may receive (ranks * T), T capacity of the phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.moe.terms import Layout

if TYPE_CHECKING:
    import torch

SCALE_GROUP = 128
"""Channels that share one float32 scale in a row of fp8 (e4m3)."""


@dataclass(frozen=True, slots=True)
class ReplicatedRows:
    """All tokens; ``ids`` are local expert ids, -1 where the expert is elsewhere or the slot is unused.

    rows [N, h], ids int64 [N, k], weights float32 [N, k], scales float32 [N, h / 128] for fp8 rows.
    The runner returns [N, k, h]; lanes with id -1 may hold anything. Where ``sums`` is a dtype, ``combine``
    also takes [N, h] of that dtype: a token's lanes added in ascending order in float32 and rounded once.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None
    sums: torch.dtype | None = None

    @property
    def layout(self) -> Layout:
        return Layout.REPLICATED


@dataclass(frozen=True, slots=True)
class ContiguousRows:
    """Rows grouped by local expert, every segment starting at a multiple of ``alignment``.

    rows [R, h] (R a multiple of ``alignment``; rows between segments may hold anything), psum int32 [L]:
    ``psum[i] = start(i) + count(i)`` with ``start(0) = 0`` and ``start(i)`` = psum[i - 1] rounded up;
    counts int32 [L], the true counts; weights float32 [R]; scales float32 [R, h / 128] for fp8 rows.
    psum and counts are on the host when the device is the CPU. The runner returns [R, h].
    """

    rows: torch.Tensor
    psum: torch.Tensor
    counts: torch.Tensor
    alignment: int
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None

    @property
    def layout(self) -> Layout:
        return Layout.CONTIGUOUS


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """A slab with static shape: rows [L, M, h], of which the first ``counts[e]`` of each expert are filled.

    counts int32 [L], weights float32 [L, M], scales float32 [L, M, h / 128] for fp8 rows. Rows at and beyond
    the count may hold anything and are never read. The runner returns [L, M, h].

    ``results`` [L, M, h] of the results' dtype, or None: where ``combine`` would have them without a copy. A
    runner may write there and return it.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None
    results: torch.Tensor | None = None

    @property
    def layout(self) -> Layout:
        return Layout.MASKED


ExpertInput = ReplicatedRows | ContiguousRows | MaskedRows
