"""Rows to the places of their experts and back: what the field calls ep_scatter, ep_gather and slab repack.

Here is what the kernels of ``placement_kernels`` must write, in plain torch. No Triton here.

Legend: n tokens, k lanes a token, E experts, A alignment, R rows of the aligned segments, M rows an expert
may have in a slab, h hidden size, g = h / 128 scale groups.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Places:
    """Where each lane's row lies when every expert's rows start at a multiple of A.

    Attributes:
        of_lane: int32 [n, k], place of each lane, -1 where it has no expert here.
        counts: int32 [E], rows of each expert.
        psum: int32 [E], start(e) + counts[e] with start(e) = psum[e - 1] rounded up to A.
        live: int32 [R / A], how many rows of each block of A are filled (the first ones).
        rows: R, a static bound; a multiple of A.
        alignment: A.
    """

    of_lane: torch.Tensor
    counts: torch.Tensor
    psum: torch.Tensor
    live: torch.Tensor
    rows: int
    alignment: int


def max_aligned_rows(lanes: int, experts: int, alignment: int) -> int:
    """The most rows that ``lanes`` rows of ``experts`` can take up: each expert pads by at most A - 1."""
    used = min(lanes, experts)
    return max(alignment, (lanes + used * (alignment - 1)) // alignment * alignment)


def reference_places(ids: torch.Tensor, experts: int, alignment: int) -> Places:
    """ids int64 [n, k] (local expert or -1): stable, so lanes of one expert keep their order."""
    lanes = ids.flatten()
    counts = torch.bincount(lanes[lanes >= 0], minlength=experts)
    padded = (counts + alignment - 1) // alignment * alignment
    starts = padded.cumsum(0) - padded
    rows = max_aligned_rows(lanes.numel(), experts, alignment)
    of_lane = torch.full_like(lanes, -1)
    live = torch.zeros(rows // alignment, dtype=torch.int32, device=ids.device)
    for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        mine = (lanes == expert).nonzero().flatten()
        of_lane[mine] = start + torch.arange(count, device=ids.device)
        for block in range(-(-count // alignment)):
            live[start // alignment + block] = min(alignment, count - block * alignment)
    return Places(
        of_lane.view(ids.shape).to(torch.int32),
        counts.to(torch.int32),
        (starts + counts).to(torch.int32),
        live,
        rows,
        alignment,
    )


def reference_scatter(x: torch.Tensor, of_lane: torch.Tensor, rows: int) -> torch.Tensor:
    """x [n, c] -> [rows, c]: each token's row at the place of each of its lanes; other rows are zero."""
    out = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
    tokens, lanes = (of_lane >= 0).nonzero(as_tuple=True)
    out[of_lane[tokens, lanes].long()] = x[tokens]
    return out


def reference_gather(
    rows: torch.Tensor, of_lane: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """rows [R, h] -> [n, h]: weight * row summed over lanes, ascending, in float32, rounded once."""
    total = torch.zeros(of_lane.shape[0], rows.shape[1], device=rows.device)
    for lane in range(of_lane.shape[1]):
        place = of_lane[:, lane].long()
        part = rows[place.clamp_min(0)].float()
        if weights is not None:
            part = part * weights[:, lane, None]
        total = total + torch.where((place >= 0)[:, None], part, 0.0)
    return total.to(dtype)


def reference_lanes(rows: torch.Tensor, of_lane: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """rows [R, h] -> [n, k, h]: weight * row of each lane; zeros where a lane has no place."""
    part = rows[of_lane.clamp_min(0).long()].float()
    if weights is not None:
        part = part * weights[:, :, None]
    return torch.where((of_lane >= 0)[:, :, None], part, 0.0).to(rows.dtype)


def reference_to_slab(
    rows: torch.Tensor, counts: torch.Tensor, psum: torch.Tensor, slab_rows: int
) -> torch.Tensor:
    """rows [R, c] in aligned segments -> slab [E, M, c]; rows at and beyond an expert's count are zero."""
    out = torch.zeros(len(counts), slab_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
    for expert, (count, end) in enumerate(zip(counts.tolist(), psum.tolist(), strict=True)):
        out[expert, :count] = rows[end - count : end]
    return out


def reference_from_slab(
    slab: torch.Tensor, counts: torch.Tensor, psum: torch.Tensor, total_rows: int
) -> torch.Tensor:
    """The way back: slab [E, M, c] -> [R, c]; rows between the segments are zero."""
    out = torch.zeros(total_rows, slab.shape[2], dtype=slab.dtype, device=slab.device)
    for expert, (count, end) in enumerate(zip(counts.tolist(), psum.tolist(), strict=True)):
        out[end - count : end] = slab[expert, :count]
    return out


def reference_silu_quantise(
    gate_up: torch.Tensor, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [R, 2i] -> (e4m3 [R, i], scales float32 [i / 128, R]) of silu(gate) * up, in float32.

    Row weights [R] go into the scales, so that the next product comes out weighted.
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    groups = (gate * torch.sigmoid(gate) * up).unflatten(1, (-1, 128))
    scale = groups.abs().amax(2).clamp_min(1e-12) / 448.0
    values = (groups / scale[:, :, None]).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    if weights is not None:
        scale = scale * weights[:, None]
    return values, scale.T.contiguous()
