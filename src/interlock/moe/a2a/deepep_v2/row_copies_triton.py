"""The Triton side of ``row_copies``; its plain reference is there."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from interlock.moe.a2a.deepep_v2.row_copies import Target


@triton.jit
def _copy_lanes(
    slots, rows, weights, scales, out_rows, out_weights, out_scales,
    words, groups, row_stride, scale_stride,
    lanes: tl.constexpr, with_scales: tl.constexpr, block: tl.constexpr, group_block: tl.constexpr,
):  # fmt: skip
    """Rows are read as int32 words; ``row_stride`` in words, ``scale_stride`` in floats."""
    lane = tl.program_id(0)
    slot = tl.load(slots + lane).to(tl.int64)
    if slot >= 0:
        source = (lane // lanes).to(tl.int64)
        tl.store(out_weights + slot, tl.load(weights + lane))
        for start in range(0, words, block):
            at = start + tl.arange(0, block)
            inside = at < words
            tl.store(
                out_rows + slot * words + at,
                tl.load(rows + source * row_stride + at, mask=inside),
                mask=inside,
            )
        if with_scales:
            group = tl.arange(0, group_block)
            held = group < groups
            tl.store(
                out_scales + slot * groups + group,
                tl.load(scales + source * scale_stride + group, mask=held),
                mask=held,
            )


def launch(
    slots: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    target: Target,
) -> None:
    """See ``row_copies.copy_lanes``."""
    source = rows.view(torch.int32)
    out = target.rows.view(torch.int32)
    groups = 0 if scales is None else scales.shape[1]
    kernel: Any = _copy_lanes
    kernel[(slots.numel(),)](
        slots, source, weights, weights if scales is None else scales,
        out, target.weights, target.weights if target.scales is None else target.scales,
        source.shape[1], groups, source.stride(0), 0 if scales is None else scales.stride(0),
        lanes=slots.shape[1], with_scales=scales is not None, block=1024,
        group_block=triton.next_power_of_2(max(1, groups)), num_warps=4,
    )  # fmt: skip
