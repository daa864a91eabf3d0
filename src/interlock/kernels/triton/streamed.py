"""Launches of the persistent fp8 GEMMs for few rows an expert."""

from __future__ import annotations

import torch

from interlock.kernels.triton import pipelined, streamed_gemm
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors
from interlock.kernels.triton.row_blocks import RowLists

BLOCK_ROWS = (16, 32)
"""Rows of a block that the kernels are compiled for; more would not fit into registers."""


def fits(experts: ExpertTensors, lists: RowLists, *, quantised: bool) -> bool:
    """Whether these kernels can compute these weights with these lists; see ``pipelined.fits``."""
    placeable = lists.source is None or (not quantised and lists.place_of_lane is not None)
    sizes = experts.down.shape[1] % pipelined.COLUMNS == 0 and lists.block_rows in BLOCK_ROWS
    return experts.fp8 and placeable and sizes and lists.counters is not None


def compute(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    experts: ExpertTensors,
    lists: RowLists,
    out: torch.Tensor,
    stages: int,
    *,
    early: bool,
) -> None:
    """out[target[p]] = weight[p] * down(silu(gate rows[p]) * up rows[p]); i and h multiples of 128 and 256.

    Gate and up stay in float32 until SwiGLU is quantised.

    Args:
        rows: e4m3 [P, h] in order of places, row_scales float32 [h / 128, P].
        stages: steps of weights in flight on each multiprocessor, 32 KiB each.
        early: the first product may read weights while the kernel launched last, which did not make
            ``lists``, still runs.
    """
    inter, places, device = experts.down.shape[2], lists.places, rows.device
    act = torch.empty(places, inter, dtype=rows.dtype, device=device)
    act_scales = torch.empty(inter // GROUP, places, dtype=torch.float32, device=device)
    _multiply(
        rows, row_scales, experts.gate_up, experts.gate_up_scales, lists, act, act_scales, stages, early
    )
    _multiply(act, act_scales, experts.down, experts.down_scales, lists, out, None, stages, True)


def _multiply(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    lists: RowLists,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
    stages: int,
    early: bool,
) -> None:
    """With ``out_scales`` gate, up and SwiGLU; without them down."""
    assert lists.counters is not None
    gated = out_scales is not None
    programs = torch.cuda.get_device_properties(rows.device).multi_processor_count
    streamed_gemm.streamed_kernel[(programs,)](
        pipelined.descriptor(rows, lists.block_rows), row_scales,
        pipelined.descriptor(weight.flatten(0, 1), GROUP), scales, out, out_scales,
        None if gated else lists.target, None if gated else lists.weight,
        lists.blocks, lists.block_count, lists.counters[0 if gated else 1 :], lists.max_blocks,
        row_scales.stride(0), out.stride(0), lists.places,
        depth=weight.shape[2], width=weight.shape[1], block_rows=lists.block_rows, stages=stages, gated=gated,
        has_target=not gated and lists.target is not None,
        has_weights=not gated and lists.weight is not None, early=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
