"""Rows in the order the experts want: building the contiguous and masked layouts, and undoing them.

Pure functions on tensors. A *lane* is one (token, expert) pair. Padded and true counts never share a name:
``counts`` are true, ``starts`` and ``psum`` are positions in the aligned rows.

Legend: P lanes, L local experts, A alignment, R rows of the contiguous layout, M rows an expert may get.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.kernels.base import ExpertRows
from interlock.moe.a2a.contract import ContractError
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the rows of each expert lie.

    counts, starts, psum int64 [L] with psum = starts + counts; ``rows`` is R (or L * M).
    """

    counts: torch.Tensor
    starts: torch.Tensor
    psum: torch.Tensor
    rows: int


def aligned_segments(counts: torch.Tensor, alignment: int) -> Segments:
    """Segments of the contiguous layout: each starts at a multiple of ``alignment``, R is one too."""
    if alignment < 1:
        raise ValueError(f"alignment {alignment}: must be at least 1")
    counts = counts.to(torch.int64)
    padded = (counts + (alignment - 1)) // alignment * alignment
    ends = padded.cumsum(0)
    starts = ends - padded
    return Segments(counts=counts, starts=starts, psum=starts + counts, rows=int(ends[-1]))


def slab_segments(counts: torch.Tensor, rows_per_expert: int) -> Segments:
    """Segments of the masked layout, seen as flat rows [L * M].

    Raises:
        ContractError: an expert got more than M rows.
    """
    counts = counts.to(torch.int64)
    most = int(counts.max()) if counts.numel() else 0
    if most > rows_per_expert:
        raise ContractError(f"an expert received {most} rows, its slab holds {rows_per_expert}")
    starts = torch.arange(counts.numel(), device=counts.device) * rows_per_expert
    return Segments(counts=counts, starts=starts, psum=starts + counts, rows=counts.numel() * rows_per_expert)


def count_lanes(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many of the lanes (int64, any shape, -1 ignored) name each expert: int64 [num_experts]."""
    return torch.bincount(experts.flatten() + 1, minlength=num_experts + 1)[1:]


def positions(experts: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Row of each lane, int64 [P]: lanes of one expert keep their order.

    Args:
        experts: int64 [P], local expert of each lane, all in [0, L).
    """
    order = experts.argsort(stable=True)
    first = segments.counts.cumsum(0) - segments.counts
    ordered_experts = experts[order]
    within = torch.arange(experts.numel(), device=experts.device) - first[ordered_experts]
    rows = torch.empty_like(experts)
    rows[order] = segments.starts[ordered_experts] + within
    return rows


def segments_of(rows: ContiguousRows | MaskedRows) -> Segments:
    """The segments that a layout's own fields describe; checks that they agree with each other.

    Raises:
        ContractError: psum, counts, alignment and the number of rows contradict each other.
    """
    if isinstance(rows, MaskedRows):
        return slab_segments(rows.counts, rows.rows.shape[1])
    segments = aligned_segments(rows.counts, rows.alignment)
    if segments.rows > rows.rows.shape[0]:
        raise ContractError(f"counts need {segments.rows} rows, {rows.rows.shape[0]} were given")
    if not torch.equal(segments.psum, rows.psum.to(torch.int64)):
        raise ContractError(
            f"psum {rows.psum.tolist()} does not follow from counts {rows.counts.tolist()} "
            f"and alignment {rows.alignment}"
        )
    return segments


def filled_rows(segments: Segments) -> torch.Tensor:
    """Flat indices of the rows that hold data, expert by expert: int64 [P]."""
    first = segments.counts.cumsum(0) - segments.counts
    shift = (segments.starts - first).repeat_interleave(segments.counts)
    return torch.arange(shift.numel(), device=shift.device) + shift


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """[L] -> int64 [L + 1], exclusive prefix sum with the total at the end."""
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


def expert_rows(rows: ExpertInput, num_experts: int) -> ExpertRows:
    """The lists for ``Kernels.expert_mlp``: it reads rows where they lie and writes results in place.

    For replicated rows the target of a lane is ``token * k + lane``; otherwise the row itself.
    """
    if isinstance(rows, ReplicatedRows):
        return _replicated_expert_rows(rows, num_experts)
    segments = segments_of(rows)
    index = filled_rows(segments)
    return ExpertRows(
        offsets=offsets_of(segments.counts),
        source=index,
        target=index,
        weight=_weight_of(rows.weights, index),
    )


def _replicated_expert_rows(rows: ReplicatedRows, num_experts: int) -> ExpertRows:
    lanes = rows.ids.flatten()
    counts = count_lanes(lanes, num_experts)
    unused = lanes.numel() - int(counts.sum())
    target = lanes.argsort(stable=True)[unused:]
    return ExpertRows(
        offsets=offsets_of(counts),
        source=target // rows.ids.shape[1],
        target=target,
        weight=_weight_of(rows.weights, target),
    )


def _weight_of(weights: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
    if weights is None:
        return torch.ones(index.numel(), device=index.device)
    return weights.flatten()[index]
