"""Launches of the persistent fp8 GEMMs for many tokens."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from interlock.kernels.triton import pipelined_gemm
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors
from interlock.kernels.triton.fp8_rows import quantise_rows, quantise_to_places
from interlock.kernels.triton.row_blocks import RowLists

BLOCK_ROWS = 128
STAGES = 4
COLUMNS = 256
"""Result columns of a tile; the width of the result must be a multiple."""


def fits(experts: ExpertTensors, lists: RowLists) -> bool:
    """Whether the persistent kernels can compute these weights with these lists."""
    hidden = experts.down.shape[1]
    return experts.fp8 and lists.block_rows == BLOCK_ROWS and hidden % COLUMNS == 0


def placed_rows(
    x: torch.Tensor, x_scales: torch.Tensor | None, lists: RowLists
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(e4m3 rows, scales [h / 128, P]) in order of places, or None where the lists do not allow it."""
    if x_scales is None and lists.place_of_lane is not None:
        return quantise_to_places(x, lists.place_of_lane)
    if lists.source is not None:
        return None
    if x_scales is None:
        return quantise_rows(x)
    return x, x_scales.T.contiguous()


def compute(
    rows: torch.Tensor, row_scales: torch.Tensor, experts: ExpertTensors, lists: RowLists, out: torch.Tensor
) -> None:
    """out[target[p]] = weight[p] * down(silu(gate rows[p]) * up rows[p]); i and h multiples of 128 and
    256."""
    _, hidden, inter = experts.down.shape
    act = torch.empty(lists.places, inter, dtype=rows.dtype, device=rows.device)
    act_scales = torch.empty(inter // GROUP, lists.places, dtype=torch.float32, device=rows.device)
    programs = torch.cuda.get_device_properties(rows.device).multi_processor_count
    gate_up_counter, down_counter = torch.zeros(2, 4, dtype=torch.int32, device=rows.device)
    pipelined_gemm.pipelined_gate_up_kernel[(programs,)](
        _descriptor(rows, 64), row_scales, _descriptor(experts.gate_up.flatten(0, 1), 128),
        experts.gate_up_scales, act, act_scales, lists.blocks, lists.block_count, gate_up_counter,
        lists.max_blocks, row_scales.stride(0), act_scales.stride(0),
        depth=hidden, inter=inter, stages=STAGES, num_warps=4,
    )  # fmt: skip
    pipelined_gemm.pipelined_down_kernel[(programs,)](
        _descriptor(act, 64), act_scales, _descriptor(experts.down.flatten(0, 1), 128), experts.down_scales,
        out, lists.target, lists.weight, lists.blocks, lists.block_count, down_counter, lists.max_blocks,
        act_scales.stride(0), out.stride(0), depth=inter, hidden=hidden, stages=STAGES,
        has_target=lists.target is not None, has_weights=lists.weight is not None, num_warps=4,
    )  # fmt: skip


def dense(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out [n, N] = rows @ weight.T for one dense weight e4m3 [N, K]: the second GEMM with a single expert."""
    count, device = rows.shape[0], rows.device
    first = torch.arange(0, count, BLOCK_ROWS, dtype=torch.int32, device=device)
    size = len(first)
    zeros = torch.zeros_like(first)
    end = (first + BLOCK_ROWS).clamp_max(count)
    blocks = torch.stack((zeros, first, end, zeros, zeros + size))
    block_count = torch.full((1,), size, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    pipelined_gemm.pipelined_down_kernel[(programs,)](
        _descriptor(rows, 64), row_scales, _descriptor(weight, 128), scales, out, None, None,
        blocks, block_count, counter, size, row_scales.stride(0), out.stride(0),
        depth=weight.shape[1], hidden=weight.shape[0], stages=STAGES,
        has_target=False, has_weights=False, num_warps=4,
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    block = [rows, GROUP]
    return TensorDescriptor.from_tensor(
        matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    )
