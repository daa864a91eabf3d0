"""The routed experts on one GPU: row lists, quantisation, two grouped GEMMs. Launches only, no
synchronisation.

Legend: n tokens, k lanes a token, h hidden size, i expert width, E local experts, P places of the row lists.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from interlock.kernels.triton import grouped_gemm, lanes, lists_at_once, pipelined, route_lists
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors
from interlock.kernels.triton.fp8_rows import GROUPS_A_PROGRAM, quantise_rows
from interlock.kernels.triton.row_blocks import (
    FEW_LANES,
    LANES_AT_ONCE,
    RowLists,
    int32_arrays,
    max_row_blocks,
    max_slab_blocks,
    part_of_chunk,
    power_of_two,
)
from interlock.kernels.triton.tuned import MoeConfig, Tile

SPARSE_PROGRAMS = 2 * 132
"""Programs that walk over the tiles in use of a list with room for many more: two for each multiprocessor."""


def token_lists(
    ids: torch.Tensor, weights: torch.Tensor | None, experts: int, block_rows: int, *, sparse: bool = False
) -> RowLists:
    """Row lists of ids int64 [n, k] (local expert or -1) and weights float32 [n, k].

    ``sparse``: most lanes are expected to be -1.
    """
    return _token_lists(ids, weights, experts, block_rows, sparse, None)


def lists_and_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    block_rows: int,
    *,
    sparse: bool = False,
) -> tuple[RowLists, torch.Tensor, torch.Tensor]:
    """``token_lists``, and beside them ``quantise_rows`` of x [n, h]: e4m3 [n, h], scales [h / 128, n].

    The rows are quantised by programs of a launch that the lists need anyhow.
    """
    rows, width = x.shape
    quantised = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=x.device)
    beside = _Quantisation(x, quantised, scales)
    return _token_lists(ids, weights, experts, block_rows, sparse, beside), quantised, scales


@dataclass(frozen=True, slots=True)
class _Quantisation:
    """Rows that programs of another launch quantise."""

    x: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor

    @property
    def programs(self) -> int:
        rows, width = self.x.shape
        return rows * -(-width // (GROUP * GROUPS_A_PROGRAM))

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        return self.x, self.out, self.scales, self.x.stride(0), self.x.shape[0]

    @property
    def constants(self) -> dict[str, int]:
        return {"depth": self.x.shape[1], "groups": GROUPS_A_PROGRAM}


def _token_lists(
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    block_rows: int,
    sparse: bool,
    beside: _Quantisation | None,
) -> RowLists:
    tokens, k = ids.shape
    count = tokens * k
    blocks = max_row_blocks(count, experts, block_rows)
    sizes = (count, count, count, 5 * blocks, 2)
    source, target, places, table, total = int32_arrays(sizes, ids.device)
    placed = None if weights is None else torch.empty(count, dtype=torch.float32, device=ids.device)
    place_of_lane = None
    if count <= FEW_LANES and tokens <= block_rows:
        width = power_of_two(max(count, 16))
        lists = (ids, weights, source, target, placed, table, total, count, k, blocks)
        constants = {"has_weights": weights is not None, "width": width, "num_warps": 4 if width <= 64 else 8}
        if beside is None:
            route_lists.few_lanes_kernel[(1,)](*lists, **constants)
        else:
            route_lists.few_lanes_quantise_kernel[(1 + beside.programs,)](
                *lists, *beside.arguments, **constants, **beside.constants
            )
    else:
        build = _lists_at_once if count <= LANES_AT_ONCE else _chunked_lists
        build(
            ids, weights, source, target, placed, places, (table, total), blocks, experts, block_rows, beside
        )
        place_of_lane = places.view(tokens, k)
    return RowLists(
        source,
        target,
        placed,
        table.view(5, blocks),
        total[:1],
        total[1:],
        places=count,
        block_rows=block_rows,
        place_of_lane=place_of_lane,
        one_block_an_expert=place_of_lane is None,
        sparse=sparse,
    )


def _lists_at_once(
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    source: torch.Tensor,
    target: torch.Tensor,
    placed: torch.Tensor | None,
    places: torch.Tensor,
    cuts: tuple[torch.Tensor, torch.Tensor],
    max_blocks: int,
    experts: int,
    block_rows: int,
    beside: _Quantisation | None,
) -> None:
    count, k = ids.numel(), ids.shape[1]
    lists = (ids, weights, source, target, placed, places, *cuts, count, k, max_blocks)
    part = 64
    constants = {
        "has_weights": weights is not None, "step": 1024, "part": part, "bins": power_of_two(experts + 1),
        "block_rows": block_rows, "num_warps": 4,
    }  # fmt: skip
    programs = 1 + -(-count // part)
    if beside is None:
        lists_at_once.lists_kernel[(programs,)](*lists, **constants)
    else:
        lists_at_once.lists_quantise_kernel[(programs + beside.programs,)](
            *lists, *beside.arguments, **constants, **beside.constants
        )


def _chunked_lists(
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    source: torch.Tensor,
    target: torch.Tensor,
    placed: torch.Tensor | None,
    places: torch.Tensor,
    cuts: tuple[torch.Tensor, torch.Tensor],
    max_blocks: int,
    experts: int,
    block_rows: int,
    beside: _Quantisation | None,
) -> None:
    count, k = ids.numel(), ids.shape[1]
    chunk = 256 if count <= 16384 else 1024
    chunks = -(-count // chunk)
    bins = power_of_two(experts + 1)
    histogram = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    tile = max(1, 4096 // bins)
    if beside is None:
        route_lists.histogram_kernel[(chunks,)](ids, histogram, count, chunk=chunk, bins=bins)
    else:
        route_lists.histogram_quantise_kernel[(chunks + beside.programs,)](
            ids, histogram, count, chunks, *beside.arguments, chunk=chunk, bins=bins, **beside.constants
        )
    route_lists.scan_kernel[(1,)](
        histogram, *cuts, chunks, experts, max_blocks,
        bins=bins, tile=tile, block_rows=block_rows, num_warps=8,
    )  # fmt: skip
    part = part_of_chunk(chunk)
    route_lists.place_kernel[(chunks, chunk // part)](
        ids, weights, histogram, source, target, placed, places, count, k,
        has_weights=weights is not None, chunk=chunk, part=part, bins=bins, tile=16, num_warps=4,
    )  # fmt: skip


def segment_lists(
    counts: torch.Tensor,
    psum: torch.Tensor | None,
    slab_rows: int,
    places: int,
    weights: torch.Tensor | None,
    block_rows: int,
) -> RowLists:
    """Row lists of rows that are grouped already: contiguous segments (``psum``) or a slab of
    ``slab_rows``."""
    experts = counts.shape[0]
    if psum is None:
        blocks = max_slab_blocks(slab_rows, experts, block_rows)
    else:
        blocks = max_row_blocks(places, experts, block_rows)
    table = torch.empty(5, blocks, dtype=torch.int32, device=counts.device)
    total = torch.empty(2, dtype=torch.int32, device=counts.device)
    route_lists.segment_blocks_kernel[(1,)](
        counts, psum, table, total, experts, slab_rows, blocks,
        has_psum=psum is not None, bins=power_of_two(experts), block_rows=block_rows,
    )  # fmt: skip
    return RowLists(
        None,
        None,
        weights,
        table,
        total[:1],
        total[1:],
        places=places,
        block_rows=block_rows,
        sparse=psum is None,
    )


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
