"""Launches of the kernels that bring rows to the places of their experts and back; no host synchronisation.

References: ``placement``. All sizes follow from the shapes of the input.

Legend: n tokens, k lanes a token, E experts, A alignment, R rows of the aligned segments, M rows an expert
may have in a slab, h hidden size, i expert width.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.kernels.triton import placement_kernels, route_lists
from interlock.kernels.triton.expert_tensors import GROUP
from interlock.kernels.triton.placement import Places, max_aligned_rows
from interlock.kernels.triton.row_blocks import int32_arrays, part_of_chunk, power_of_two

GROUPS_A_PROGRAM = 8
COUNTED_CHUNK = 1024
"""Lanes of a chunk from which ranks come from counts, not comparisons."""
PROGRAMS = 132 * 32
"""Enough programs to fill the card; more only walk over empty rows."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Equal stretches of ``rows`` rows of which the first ``live[entry]`` (int32) are filled.

    Scales of entry e, group c, row j lie at ``e * scale_entry_stride + c * scale_stride + j``.
    """

    live: torch.Tensor
    rows: int
    scale_entry_stride: int
    scale_stride: int

    @property
    def workers(self) -> int:
        """Programs that share an entry's rows."""
        return max(1, min(self.rows, PROGRAMS // max(1, len(self.live))))


def aligned_places(ids: torch.Tensor, experts: int, alignment: int) -> Places:
    """Places of ids int64 [n, k] (local expert or -1), every expert's rows starting at a multiple of A."""
    count = ids.numel()
    rows = max_aligned_rows(count, experts, alignment)
    blocks = rows // alignment
    of_lane, counts, psum, live = int32_arrays((count, experts, experts, blocks), ids.device)
    chunk = 256 if count <= 16384 else 1024
    chunks = -(-count // chunk)
    bins = power_of_two(experts + 1)
    histogram = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    route_lists.histogram_kernel[(chunks,)](ids, histogram, count, chunk=chunk, bins=bins)
    placement_kernels.aligned_scan_kernel[(1,)](
        histogram, counts, psum, live, chunks, experts, blocks,
        bins=bins, tile=max(1, 4096 // bins), alignment=alignment, num_warps=8,
    )  # fmt: skip
    part = part_of_chunk(chunk)
    placement_kernels.place_of_lane_kernel[(chunks, chunk // part)](
        ids,
        histogram,
        of_lane,
        count,
        chunk=chunk,
        part=part,
        bins=bins,
        tile=16,
        counts=chunk >= COUNTED_CHUNK,
        num_warps=4,
    )
    return Places(of_lane.view(ids.shape), counts, psum, live, rows, alignment)


def live_blocks(counts: torch.Tensor, psum: torch.Tensor, rows: int, alignment: int) -> torch.Tensor:
    """``Places.live`` of segments that are there already: counts, psum int32 [E] -> int32 [rows / A]."""
    experts, blocks = counts.shape[0], rows // alignment
    live = torch.empty(blocks, dtype=torch.int32, device=counts.device)
    placement_kernels.segment_live_kernel[(1,)](
        counts, psum, live, experts, blocks, bins=power_of_two(experts), alignment=alignment, num_warps=8
    )
    return live


def scatter_rows(
    x: torch.Tensor, scales: torch.Tensor, of_lane: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x e4m3 [n, h], scales float32 [n, h / 128], of_lane int32 [n, k] -> (e4m3 [R, h], [h / 128, R]).

    Rows that no lane names are undefined.
    """
    (tokens, width), k = x.shape, of_lane.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    out_scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=x.device)
    block = 1024
    placement_kernels.scatter_rows_kernel[(tokens, -(-width // block))](
        x.view(torch.uint8), scales, of_lane, out.view(torch.uint8), out_scales,
        x.stride(0), scales.stride(0), scales.stride(1), rows,
        lanes=k, width=width, block=block, groups=block // GROUP, num_warps=4,
    )  # fmt: skip
    return out, out_scales


def gather(
    rows: torch.Tensor, of_lane: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """rows [R, h], of_lane int32 [n, k], weights float32 [n, k] -> [n, h]; see ``reference_gather``."""
    (tokens, k), hidden = of_lane.shape, rows.shape[1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=rows.device)
    block = min(1024, power_of_two(hidden))
    placement_kernels.gather_kernel[(tokens, -(-hidden // block))](
        rows,
        of_lane,
        weights,
        out,
        hidden,
        lanes=k,
        block=block,
        has_weights=weights is not None,
        num_warps=4,
    )
    return out


def gather_lanes(rows: torch.Tensor, of_lane: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """rows [R, h] -> [n, k, h]; lanes without a place are undefined. See ``reference_lanes``."""
    (tokens, k), hidden = of_lane.shape, rows.shape[1]
    out = torch.empty(tokens, k, hidden, dtype=rows.dtype, device=rows.device)
    block = min(1024, power_of_two(hidden))
    placement_kernels.gather_lanes_kernel[(tokens, -(-hidden // block))](
        rows,
        of_lane,
        weights,
        out,
        hidden,
        lanes=k,
        block=block,
        has_weights=weights is not None,
        num_warps=4,
    )
    return out


def silu_quantise(
    gate_up: torch.Tensor, entries: Entries, weights: torch.Tensor | None, scales: torch.Tensor
) -> torch.Tensor:
    """gate_up [R, 2i] -> e4m3 [R, i], and its ``scales`` filled in; see ``reference_silu_quantise``.

    Args:
        weights: float32 [R], multiplied into the scales.
        scales: float32, laid out as ``entries`` says.
    """
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    act = torch.empty(rows, inter, dtype=torch.float8_e4m3fn, device=gate_up.device)
    parts = -(-inter // (GROUP * GROUPS_A_PROGRAM))
    placement_kernels.silu_quantise_rows_kernel[(len(entries.live), entries.workers, parts)](
        gate_up, entries.live, weights, act, scales, entries.rows, entries.scale_entry_stride,
        entries.scale_stride, inter=inter, groups=GROUPS_A_PROGRAM, has_weights=weights is not None,
        num_warps=4,
    )  # fmt: skip
    return act


def quantise_entries(
    x: torch.Tensor, entries: Entries, scales: torch.Tensor, out_rows: int | None = None
) -> torch.Tensor:
    """x [R, h] -> e4m3 [R, h] of the filled rows, and their ``scales``, laid out as ``entries`` says.

    Args:
        out_rows: rows that each entry takes up in the result, at least as many as in x; as many by default.
    """
    width = x.shape[1]
    out_rows = entries.rows if out_rows is None else out_rows
    out = torch.empty(len(entries.live) * out_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    parts = -(-width // (GROUP * GROUPS_A_PROGRAM))
    placement_kernels.quantise_entries_kernel[(len(entries.live), entries.workers, parts)](
        x, entries.live, out, scales, entries.rows, out_rows, entries.scale_entry_stride,
        entries.scale_stride, width=width, groups=GROUPS_A_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out


def to_slab(rows: torch.Tensor, counts: torch.Tensor, psum: torch.Tensor, slab_rows: int) -> torch.Tensor:
    """rows [R, c] in aligned segments -> slab [E, M, c]; rows at and beyond the count are undefined.

    An expert with more than M rows loses the rest: size M by the capacity.
    """
    slab = torch.empty(counts.shape[0], slab_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
    _move(rows.unsqueeze(0).expand(counts.shape[0], -1, -1), slab, counts, psum, slab_rows, to_slab=True)
    return slab


def from_slab(slab: torch.Tensor, counts: torch.Tensor, psum: torch.Tensor, total_rows: int) -> torch.Tensor:
    """slab [E, M, c] -> rows [R, c] in aligned segments; rows between them are undefined."""
    experts, slab_rows, width = slab.shape
    rows = torch.empty(total_rows, width, dtype=slab.dtype, device=slab.device)
    _move(slab, rows.unsqueeze(0).expand(experts, -1, -1), counts, psum, slab_rows, to_slab=False)
    return rows


def scales_to_slab(
    scales: torch.Tensor, counts: torch.Tensor, psum: torch.Tensor, slab_rows: int
) -> torch.Tensor:
    """scales float32 [R, g] of any strides -> [E, M, g], rows of a group side by side (M padded to 4)."""
    experts, groups = counts.shape[0], scales.shape[1]
    padded = -(-slab_rows // 4) * 4
    slab = torch.empty(experts, groups, padded, dtype=scales.dtype, device=scales.device)
    target = slab.transpose(1, 2)[:, :slab_rows]
    _move(scales.unsqueeze(0).expand(experts, -1, -1), target, counts, psum, slab_rows, to_slab=True)
    return target


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    counts: torch.Tensor,
    psum: torch.Tensor,
    slab_rows: int,
    *,
    to_slab: bool,
) -> None:
    """source, target [E, rows, c] views; the side that is not a slab has expert stride 0."""
    if source.dtype == torch.float8_e4m3fn:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    experts, _, width = source.shape
    block = min(1024, power_of_two(width))
    workers = max(1, min(slab_rows, PROGRAMS // max(1, experts)))
    placement_kernels.move_rows_kernel[(experts, workers, -(-width // block))](
        source, target, counts, psum, slab_rows, *source.stride(), *target.stride(),
        width=width, block=block, to_slab=to_slab, num_warps=4,
    )  # fmt: skip
