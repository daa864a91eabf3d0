"""The two grouped GEMMs of an MoE layer, gather and SwiGLU and quantisation and weighting fused in.

Weights are the first operand of every product (64 rows of a Hopper matrix instruction), tokens the second, so
that a block of few tokens wastes no arithmetic: [weight rows, K] x [K, tokens]. Weight tiles come through
tensor descriptors (the bulk copy engine), gathered token rows through asynchronous copies.

fp8: products of 128 channels are summed in the matrix unit, scaled by (weight block scale * token group
scale) and accumulated in float32 registers.

Each product has two kernels around one tile: a program a tile, for lists that are nearly full, and a few
programs that walk over the tiles in use, for lists with room for far more (slabs, a share of the experts).

Legend: e expert, K depth, i expert width, h hidden size, P places in the row lists, B row blocks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from interlock.kernels.triton.quantise import to_fp8


@triton.jit
def find_tile(blocks, max_blocks, tile, tiles: tl.constexpr, one_block: tl.constexpr):
    """(expert or -1, column tile, first place, end) of a tile; the blocks of an expert take a column in turn.

    So the programs that read the same weights run side by side, and the weights come from memory once.
    """
    block = tile // tiles
    column = tile % tiles
    expert = tl.load(blocks + block)
    if not one_block:
        leader = tl.load(blocks + 3 * max_blocks + block)
        size = tl.load(blocks + 4 * max_blocks + block)
        if expert >= 0:
            inside = tile - leader * tiles
            column = inside // size
            block = leader + inside % size
    return expert, column, tl.load(blocks + max_blocks + block), tl.load(blocks + 2 * max_blocks + block)


@triton.jit
def _gate_up_tile(
    x, x_scales, weight, weight_scales, act, act_scales, source,
    expert, index, first, end, x_stride, x_scale_row_stride, x_scale_stride, act_scale_stride,
    depth: tl.constexpr, inter: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, fp8: tl.constexpr, has_source: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    column = index * block_n
    place = first + tl.arange(0, block_rows)
    live = place < end
    row = tl.load(source + place, mask=live, other=0) if has_source else tl.where(live, place, first)
    gate_row = expert * (2 * inter) + column
    inside = tl.arange(0, block_k)
    rows = x + row[:, None].to(tl.int64) * x_stride + inside[None, :]
    gate = tl.zeros([block_n, block_rows], tl.float32)
    up = tl.zeros([block_n, block_rows], tl.float32)
    if fp8:
        groups: tl.constexpr = depth // 128
        gate_scales = weight_scales + (gate_row // 128).to(tl.int64) * groups
        up_scales = gate_scales + inter // 128 * groups
        token_scales = x_scales + row.to(tl.int64) * x_scale_row_stride
        for step in tl.range(0, depth // block_k, num_stages=stages):
            scale = tl.load(token_scales + step.to(tl.int64) * x_scale_stride)
            gate_scale = tl.load(gate_scales + step)
            up_scale = tl.load(up_scales + step)
            tokens = tl.load(rows + step * block_k).T
            gate_tile = weight.load([gate_row, step * block_k])
            up_tile = weight.load([gate_row + inter, step * block_k])
            gate += tl.dot(gate_tile, tokens) * (scale * gate_scale)[None, :]
            up += tl.dot(up_tile, tokens) * (scale * up_scale)[None, :]
    else:
        for step in tl.range(0, (depth + block_k - 1) // block_k, num_stages=stages):
            if depth % block_k == 0:
                tokens = tl.load(rows + step * block_k).T
            else:
                tokens = tl.load(
                    rows + step * block_k, mask=step * block_k + inside[None, :] < depth, other=0
                ).T
            gate = tl.dot(weight.load([gate_row, step * block_k]), tokens, gate)
            up = tl.dot(weight.load([gate_row + inter, step * block_k]), tokens, up)
    result = gate / (1.0 + tl.exp(-gate)) * up
    out_column = column + tl.arange(0, block_n)
    target = act + place[:, None].to(tl.int64) * inter + out_column[None, :]
    if fp8:
        quantised, scale = to_fp8(result, 0)
        tl.store(target, quantised.T, mask=live[:, None])
        tl.store(act_scales + (column // 128).to(tl.int64) * act_scale_stride + place, scale, mask=live)
    else:
        mask = live[:, None] & (out_column[None, :] < inter)
        tl.store(target, result.T.to(act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_blocks", "x_scale_stride", "act_scale_stride"])
def gate_up_kernel(
    x, x_scales, weight, weight_scales, act, act_scales, source,
    blocks, block_count, max_blocks, x_stride, x_scale_row_stride, x_scale_stride, act_scale_stride,
    depth: tl.constexpr, inter: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, fp8: tl.constexpr, has_source: tl.constexpr, stages: tl.constexpr, one_block:
    tl.constexpr,
):  # fmt: skip
    """act[p] = silu(gate_e x[source[p]]) * (up_e x[source[p]]) for every listed place p.

    x [*, K], x_scales of (row, group) at the given strides; weight descriptor over [E * 2i, K]; act [P, i]:
    e4m3 with act_scales [i / 128, P], or x's dtype.
    """
    tiles: tl.constexpr = (inter + block_n - 1) // block_n
    expert, index, first, end = find_tile(blocks, max_blocks, tl.program_id(0), tiles, one_block)
    if expert < 0:
        return
    _gate_up_tile(
        x, x_scales, weight, weight_scales, act, act_scales, source,
        expert, index, first, end, x_stride, x_scale_row_stride, x_scale_stride, act_scale_stride,
        depth, inter, block_rows, block_n, block_k, fp8, has_source, stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_blocks", "x_scale_stride", "act_scale_stride"])
def sparse_gate_up_kernel(
    x, x_scales, weight, weight_scales, act, act_scales, source,
    blocks, block_count, max_blocks, x_stride, x_scale_row_stride, x_scale_stride, act_scale_stride,
    depth: tl.constexpr, inter: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, fp8: tl.constexpr, has_source: tl.constexpr, stages: tl.constexpr, one_block:
    tl.constexpr,
):  # fmt: skip
    """As ``gate_up_kernel``, with any number of programs."""
    tiles: tl.constexpr = (inter + block_n - 1) // block_n
    for tile in range(tl.program_id(0), tl.load(block_count) * tiles, tl.num_programs(0)):
        expert, index, first, end = find_tile(blocks, max_blocks, tile, tiles, one_block)
        _gate_up_tile(
            x, x_scales, weight, weight_scales, act, act_scales, source,
            expert, index, first, end, x_stride, x_scale_row_stride, x_scale_stride, act_scale_stride,
            depth, inter, block_rows, block_n, block_k, fp8, has_source, stages,
        )  # fmt: skip


@triton.jit
def _down_tile(
    act, act_scales, weight, weight_scales, out, target, row_weights,
    expert, index, first, end, act_scale_stride, out_stride,
    depth: tl.constexpr, hidden: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, fp8: tl.constexpr, has_target: tl.constexpr, has_weights: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    column = index * block_n
    place = first + tl.arange(0, block_rows)
    live = place < end
    row = tl.where(live, place, first)
    weight_row = expert * hidden + column
    inside = tl.arange(0, block_k)
    rows = act + row[:, None].to(tl.int64) * depth + inside[None, :]
    total = tl.zeros([block_n, block_rows], tl.float32)
    if fp8:
        groups: tl.constexpr = depth // 128
        scales = weight_scales + (weight_row // 128).to(tl.int64) * groups
        token_scales = act_scales + row
        for step in tl.range(0, depth // block_k, num_stages=stages):
            scale = tl.load(token_scales + step.to(tl.int64) * act_scale_stride) * tl.load(scales + step)
            tokens = tl.load(rows + step * block_k).T
            total += tl.dot(weight.load([weight_row, step * block_k]), tokens) * scale[None, :]
    else:
        for step in tl.range(0, (depth + block_k - 1) // block_k, num_stages=stages):
            if depth % block_k == 0:
                tokens = tl.load(rows + step * block_k).T
            else:
                tokens = tl.load(
                    rows + step * block_k, mask=step * block_k + inside[None, :] < depth, other=0
                ).T
            total = tl.dot(weight.load([weight_row, step * block_k]), tokens, total)
    if has_weights:
        total *= tl.load(row_weights + place, mask=live, other=0.0)[None, :]
    goal = tl.load(target + place, mask=live, other=0) if has_target else place
    out_column = column + tl.arange(0, block_n)
    mask = live[:, None] & (out_column[None, :] < hidden)
    where = out + goal[:, None].to(tl.int64) * out_stride + out_column[None, :]
    tl.store(where, total.T.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_blocks", "act_scale_stride"])
def down_kernel(
    act, act_scales, weight, weight_scales, out, target, row_weights,
    blocks, block_count, max_blocks, act_scale_stride, out_stride,
    depth: tl.constexpr, hidden: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, fp8: tl.constexpr, has_target: tl.constexpr, has_weights: tl.constexpr,
    stages: tl.constexpr, one_block: tl.constexpr,
):  # fmt: skip
    """out[target[p]] = row_weights[p] * down_e act[p] for every listed place p.

    act [P, i] with act_scales [i / 128, P] when e4m3; weight descriptor over [E * h, i]; out [*, h].
    """
    tiles: tl.constexpr = (hidden + block_n - 1) // block_n
    expert, index, first, end = find_tile(blocks, max_blocks, tl.program_id(0), tiles, one_block)
    if expert < 0:
        return
    _down_tile(
        act, act_scales, weight, weight_scales, out, target, row_weights,
        expert, index, first, end, act_scale_stride, out_stride,
        depth, hidden, block_rows, block_n, block_k, fp8, has_target, has_weights, stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_blocks", "act_scale_stride"])
def sparse_down_kernel(
    act, act_scales, weight, weight_scales, out, target, row_weights,
    blocks, block_count, max_blocks, act_scale_stride, out_stride,
    depth: tl.constexpr, hidden: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, fp8: tl.constexpr, has_target: tl.constexpr, has_weights: tl.constexpr,
    stages: tl.constexpr, one_block: tl.constexpr,
):  # fmt: skip
    """As ``down_kernel``, with any number of programs."""
    tiles: tl.constexpr = (hidden + block_n - 1) // block_n
    for tile in range(tl.program_id(0), tl.load(block_count) * tiles, tl.num_programs(0)):
        expert, index, first, end = find_tile(blocks, max_blocks, tile, tiles, one_block)
        _down_tile(
            act, act_scales, weight, weight_scales, out, target, row_weights,
            expert, index, first, end, act_scale_stride, out_stride,
            depth, hidden, block_rows, block_n, block_k, fp8, has_target, has_weights, stages,
        )  # fmt: skip
