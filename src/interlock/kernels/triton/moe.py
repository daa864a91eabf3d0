"""The routed experts on one GPU: quantisation and two grouped GEMMs, by row lists. Launches only, no
synchronisation.

Legend: n tokens, k lanes a token, h hidden size, i expert width, E local experts, P places of the row lists.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from interlock.kernels.triton import grouped_gemm, lanes, pipelined
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors
from interlock.kernels.triton.fp8_rows import quantise_rows
from interlock.kernels.triton.row_blocks import (
    RowLists,
    power_of_two,
)
from interlock.kernels.triton.tuned import MoeConfig, Tile

SPARSE_PROGRAMS = 2 * 132
"""Programs that walk over the tiles in use of a list with room for many more: two for each multiprocessor."""


def rounds_gate_up(
    experts: ExpertTensors, lists: RowLists, config: MoeConfig, *, quantised: bool = False
) -> bool:
    """Whether ``compute`` rounds gate and up to bfloat16: where the persistent kernels store them."""
    return config.pipelined and pipelined.fits(experts, lists, quantised=quantised)


def compute(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    experts: ExpertTensors,
    lists: RowLists,
    out: torch.Tensor,
    config: MoeConfig,
) -> None:
    """out[target] = weight * down(silu(gate x[source]) * up x[source]) for every place.

    x [*, h] bfloat16, or e4m3 with x_scales float32 [*, h / 128] (any strides) when the weights are e4m3.
    Gate and up stay in float32 unless ``rounds_gate_up``.
    """
    if rounds_gate_up(experts, lists, config, quantised=x_scales is not None):
        pipelined.compute(*pipelined.placed_rows(x, x_scales, lists), experts, lists, out)
        return
    if experts.fp8 and x_scales is None:
        x, transposed = quantise_rows(x)
        x_scales = transposed.T
    inter = experts.down.shape[2]
    act = torch.empty(lists.places, inter, dtype=x.dtype, device=x.device)
    act_scales = None
    if experts.fp8:
        act_scales = torch.empty(inter // GROUP, lists.places, dtype=torch.float32, device=x.device)
    _gate_up(x, x_scales, experts, lists, act, act_scales, config)
    _down(act, act_scales, experts, lists, out, config)


def _gate_up(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    experts: ExpertTensors,
    lists: RowLists,
    act: torch.Tensor,
    act_scales: torch.Tensor | None,
    config: MoeConfig,
) -> None:
    tile, inter = config.gate_up, act.shape[1]
    strides = (0, 0) if x_scales is None else x_scales.stride()
    kernel, programs = _way(
        lists, -(-inter // tile.block_n), grouped_gemm.gate_up_kernel, grouped_gemm.sparse_gate_up_kernel
    )
    kernel[(programs,)](
        x, x_scales, _descriptor(experts.gate_up, tile), experts.gate_up_scales, act, act_scales,
        lists.source, lists.blocks, lists.block_count, lists.max_blocks, x.stride(0), *strides, lists.places,
        depth=x.shape[1], inter=inter, block_rows=lists.block_rows, block_n=tile.block_n,
        block_k=tile.block_k, fp8=experts.fp8, has_source=lists.source is not None,
        stages=tile.stages, one_block=lists.one_block_an_expert, num_warps=tile.warps,
    )  # fmt: skip


def _down(
    act: torch.Tensor,
    act_scales: torch.Tensor | None,
    experts: ExpertTensors,
    lists: RowLists,
    out: torch.Tensor,
    config: MoeConfig,
) -> None:
    tile, hidden = config.down, experts.down.shape[1]
    kernel, programs = _way(
        lists, -(-hidden // tile.block_n), grouped_gemm.down_kernel, grouped_gemm.sparse_down_kernel
    )
    kernel[(programs,)](
        act, act_scales, _descriptor(experts.down, tile), experts.down_scales, out, lists.target,
        lists.weight, lists.blocks, lists.block_count, lists.max_blocks, lists.places, out.stride(0),
        depth=act.shape[1], hidden=hidden, block_rows=lists.block_rows, block_n=tile.block_n,
        block_k=tile.block_k, fp8=experts.fp8, has_target=lists.target is not None,
        has_weights=lists.weight is not None, stages=tile.stages, one_block=lists.one_block_an_expert,
        num_warps=tile.warps,
    )  # fmt: skip


def _way(lists: RowLists, tiles: int, dense: Any, sparse: Any) -> tuple[Any, int]:
    """The kernel for these lists, and how many programs: one a tile, or a few that walk over those in use."""
    programs = lists.max_blocks * tiles
    if lists.sparse and programs > 2 * SPARSE_PROGRAMS:
        return sparse, SPARSE_PROGRAMS
    return dense, programs


def _descriptor(weight: torch.Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.block_n, tile.block_k])


def sum_lanes(rows: torch.Tensor, ids: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """rows [n, k, h], ids int64 [n, k] -> [n, h]; see ``Kernels.sum_lanes``."""
    tokens, k, hidden = rows.shape
    out = torch.empty(tokens, hidden, dtype=out_dtype, device=rows.device)
    if tokens:
        block = min(1024, power_of_two(hidden))
        lanes.sum_lanes_kernel[(tokens, -(-hidden // block))](
            rows, ids, out, hidden, lanes=k, block=block, has_ids=ids is not None, num_warps=4
        )
    return out
