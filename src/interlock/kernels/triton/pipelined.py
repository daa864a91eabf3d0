"""Launches of the persistent fp8 GEMMs for many tokens."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from interlock.kernels.triton import pipelined_gemm
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors
from interlock.kernels.triton.fp8_rows import quantise_rows, quantise_to_places
from interlock.kernels.triton.placed_rows import Entries, silu_quantise
from interlock.kernels.triton.row_blocks import RowLists

BLOCK_ROWS = 128
STAGES = 4
COLUMNS = 256
"""Result columns of a tile; the width of the result must be a multiple."""


def fits(experts: ExpertTensors, lists: RowLists, *, quantised: bool) -> bool:
    """Whether the persistent kernels can compute these weights with these lists.

    ``quantised``: rows come in fp8; then they must lie in order of places already.
    """
    placeable = lists.source is None or (not quantised and lists.place_of_lane is not None)
    hidden = experts.down.shape[1]
    return experts.fp8 and placeable and lists.block_rows == BLOCK_ROWS and hidden % COLUMNS == 0


def placed_rows(
    x: torch.Tensor, x_scales: torch.Tensor | None, lists: RowLists
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 rows, scales [h / 128, P]) in order of places, for what ``fits``."""
    if x_scales is None and lists.place_of_lane is not None:
        return quantise_to_places(x, lists.place_of_lane)
    if x_scales is None:
        return quantise_rows(x)
    return x, x_scales.T.contiguous()


def compute(
    rows: torch.Tensor, row_scales: torch.Tensor, experts: ExpertTensors, lists: RowLists, out: torch.Tensor
) -> None:
    """out[target[p]] = weight[p] * down(silu(gate rows[p]) * up rows[p]); i and h multiples of 128 and 256.

    Gate and up come out side by side in bfloat16; SwiGLU and the quantisation of its result are a kernel of
    their own, since compiled into the product they make its sums spill.
    """
    inter, places, device = experts.down.shape[2], lists.places, rows.device
    counters = torch.zeros(2, 4, dtype=torch.int32, device=device)
    ones = torch.ones(places, dtype=torch.float32, device=device)
    gate_up = torch.empty(places, 2 * inter, dtype=torch.bfloat16, device=device)
    _multiply(
        rows, row_scales, experts.gate_up, experts.gate_up_scales, lists, gate_up, counters[0], None, ones
    )
    act_scales = torch.empty(inter // GROUP, places, dtype=torch.float32, device=device)
    listed = Entries(lists.end, places, scale_entry_stride=0, scale_stride=places)
    act = silu_quantise(gate_up, listed, None, act_scales)
    del gate_up
    weights = ones if lists.weight is None else lists.weight
    _multiply(
        act, act_scales, experts.down, experts.down_scales, lists, out, counters[1], lists.target, weights
    )


def _multiply(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    lists: RowLists,
    out: torch.Tensor,
    counter: torch.Tensor,
    target: torch.Tensor | None,
    row_weights: torch.Tensor,
) -> None:
    """out[target[p]] = row_weights[p] * (weight [E, N, K] of p's expert) rows[p]; counter int32 [1], zero."""
    programs = torch.cuda.get_device_properties(rows.device).multi_processor_count
    pipelined_gemm.pipelined_kernel[(programs,)](
        _descriptor(rows, 64), row_scales, _descriptor(weight.flatten(0, 1), 128), scales,
        out, target, row_weights, lists.blocks, lists.block_count, counter, lists.max_blocks,
        row_scales.stride(0), out.stride(0), depth=weight.shape[2], width=weight.shape[1], stages=STAGES,
        has_target=target is not None, num_warps=4,
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """Over e4m3 ``matrix``, in boxes of ``rows`` rows by 128."""
    block = [rows, GROUP]
    return TensorDescriptor.from_tensor(
        matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    )
