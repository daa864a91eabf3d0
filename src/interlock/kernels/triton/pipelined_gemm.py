"""The two grouped GEMMs of an MoE layer for many tokens, fp8: bound by the matrix units.

Persistent programs of three roles: one warp feeds a ring of shared-memory stages through the bulk copy
engine, two groups of four warps each multiply 64 token rows by 2 x 128 weight rows. The two groups run
unsynchronised, so one scales its partial sums (float32 registers) while the other keeps the matrix units
busy.

Tiles are handed out by a counter in device memory, so that programs which share weights start together; a
fixed assignment lets them drift apart, and the weights then come from memory several times (measured on an
H200: 17 GB read for 4 GB of weights).

A tile is 128 places by two column blocks ("a" and "b") of 128: gate and up of the same columns, or
neighbouring columns of the result. Rows arrive sorted by place. A group whose 64 rows are all dead multiplies
nothing.

Legend: P places, B row blocks of 128, E experts, i expert width, h hidden size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

HALF: gl.constexpr = gl.constexpr(64)
WIDE: gl.constexpr = gl.constexpr(128)
TICKETS: gl.constexpr = gl.constexpr(2)


@gluon.jit
def _tile(tile, tiles: gl.constexpr, blocks, max_blocks):
    """As ``grouped_gemm.find_tile``; every tile below the total exists."""
    leader = gl.load(blocks + 3 * max_blocks + tile // tiles)
    size = gl.load(blocks + 4 * max_blocks + tile // tiles)
    inside = tile - leader * tiles
    block = blocks + leader + inside % size
    return gl.load(block), inside // size, gl.load(block + max_blocks), gl.load(block + 2 * max_blocks)


@gluon.jit
def _announce(tickets, ready, free, slot, tile):
    """Tell both groups the tile to multiply next; any number at or beyond the total ends them."""
    mbarrier.wait(free.index(slot % TICKETS), (slot // TICKETS & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tickets.index(slot % TICKETS).store(gl.full([1], 0, gl.int32, layout) + tile)
    mbarrier.arrive(ready.index(slot % TICKETS))


@gluon.jit
def _next_tile(tickets, ready, free, slot):
    mbarrier.wait(ready.index(slot % TICKETS), slot // TICKETS & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.max(tickets.index(slot % TICKETS).load(layout), axis=0)
    mbarrier.arrive(free.index(slot % TICKETS))
    return tile


@gluon.jit
def _feed(
    rows, weight, ring, queue, counter, cuts, total,
    tiles: gl.constexpr, depth: gl.constexpr, expert_rows: gl.constexpr, column_step: gl.constexpr,
    b_offset: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    row_stages, a_stages, b_stages, full, empty = ring
    tickets, ready, free = queue
    count = 0
    slot = 0
    tile = gl.atomic_add(counter, 1)
    while tile < total:
        _announce(tickets, ready, free, slot, tile)
        following = gl.atomic_add(counter, 1)
        expert, index, first, end = _tile(tile, tiles, cuts[0], cuts[1])
        weight_row = expert * expert_rows + index * column_step
        both = first + HALF < end
        for step in range(depth // WIDE):
            stage = count % stages
            mbarrier.wait(empty.index(stage), (count // stages & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 49152, pred=both)
            mbarrier.expect(bar, 40960, pred=both == 0)
            tma.async_copy_global_to_shared(weight, [weight_row, step * WIDE], bar, a_stages.index(stage))
            tma.async_copy_global_to_shared(rows, [first, step * WIDE], bar, row_stages.index(2 * stage))
            tma.async_copy_global_to_shared(
                rows, [first + HALF, step * WIDE], bar, row_stages.index(2 * stage + 1), pred=both
            )
            tma.async_copy_global_to_shared(
                weight, [weight_row + b_offset, step * WIDE], bar, b_stages.index(stage)
            )
            count += 1
        slot += 1
        tile = following
    _announce(tickets, ready, free, slot, tile)


@gluon.jit
def _multiply(
    ring, row_scales, rows_at, weight_scales, scales_at, count, alive,
    row_scale_stride, scale_step: gl.constexpr, group: gl.constexpr, depth: gl.constexpr, stages:
    gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows by two column blocks -> two float32 [64, 128]; scales of the next step are loaded a step
    ahead."""
    row_stages, a_stages, b_stages, full, empty = ring
    zeros = gl.zeros([HALF, WIDE], gl.float32, layout)
    total_a = zeros
    total_b = zeros
    steps: gl.constexpr = depth // WIDE
    row_scale = gl.load(row_scales + rows_at)
    a_scale = gl.load(weight_scales + scales_at)
    b_scale = gl.load(weight_scales + scale_step + scales_at)
    for step in range(steps):
        stage = count % stages
        mbarrier.wait(full.index(stage), count // stages & 1)
        rows = row_stages.index(2 * stage + group)
        if alive:
            part = warpgroup_mma(
                rows, a_stages.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            following = gl.minimum(step + 1, steps - 1)
            next_row_scale = gl.load(row_scales + following.to(gl.int64) * row_scale_stride + rows_at)
            next_a_scale = gl.load(weight_scales + scales_at + following)
            next_b_scale = gl.load(weight_scales + scale_step + scales_at + following)
            part = warpgroup_mma_wait(0, deps=[part])
            total_a += part * gl.expand_dims(row_scale * a_scale, 1)
            part = warpgroup_mma(
                rows, b_stages.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            part = warpgroup_mma_wait(0, deps=[part])
            total_b += part * gl.expand_dims(row_scale * b_scale, 1)
            row_scale = next_row_scale
            a_scale = next_a_scale
            b_scale = next_b_scale
        mbarrier.arrive(empty.index(stage))
        count += 1
    return total_a, total_b, count


@gluon.jit
def _gate_up_tiles(
    ring, queue, row_scales, weight_scales, act, act_scales, cuts, total,
    row_scale_stride, act_scale_stride, group: gl.constexpr, depth: gl.constexpr, inter: gl.constexpr,
    stages: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    groups: gl.constexpr = depth // WIDE
    tiles: gl.constexpr = inter // WIDE
    tickets, ready, free = queue
    count = 0
    slot = 0
    tile = _next_tile(tickets, ready, free, slot)
    while tile < total:
        expert, index, first, end = _tile(tile, tiles, cuts[0], cuts[1])
        start = first + group * HALF
        place = start + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        live = place < end
        gate, up, count = _multiply(
            ring, row_scales, gl.where(live, place, first),
            weight_scales, (expert * (2 * tiles) + index) * groups, count, start < end, row_scale_stride,
            tiles * groups, group, depth, stages, layout,
        )  # fmt: skip
        if start < end:
            result = gate / (1.0 + gl.exp(-gate)) * up
            scale = gl.maximum(gl.max(gl.abs(result), axis=1), 1e-12) / 448.0
            scaled = gl.minimum(gl.maximum(result / gl.expand_dims(scale, 1), -448.0), 448.0)
            quantised = gl.convert_layout(scaled.to(gl.float8e4nv), stored)
            gl.store(act_scales + index.to(gl.int64) * act_scale_stride + place, scale, mask=live)
            row = start + gl.arange(0, HALF, gl.SliceLayout(1, stored))
            column = index * WIDE + gl.arange(0, WIDE, gl.SliceLayout(0, stored))
            where = act + gl.expand_dims(row.to(gl.int64) * inter, 1) + gl.expand_dims(column, 0)
            gl.store(where, quantised, mask=gl.expand_dims(row < end, 1))
        slot += 1
        tile = _next_tile(tickets, ready, free, slot)


@gluon.jit
def _down_tiles(
    ring, queue, row_scales, weight_scales, out, target, row_weights, cuts, total,
    row_scale_stride, out_stride, group: gl.constexpr, depth: gl.constexpr, hidden: gl.constexpr,
    stages: gl.constexpr, has_target: gl.constexpr, has_weights: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    groups: gl.constexpr = depth // WIDE
    tiles: gl.constexpr = hidden // (2 * WIDE)
    tickets, ready, free = queue
    count = 0
    slot = 0
    tile = _next_tile(tickets, ready, free, slot)
    while tile < total:
        expert, index, first, end = _tile(tile, tiles, cuts[0], cuts[1])
        start = first + group * HALF
        place = start + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        live = place < end
        left, right, count = _multiply(
            ring, row_scales, gl.where(live, place, first),
            weight_scales, (expert * tiles + index) * (2 * groups), count, start < end, row_scale_stride,
            groups, group, depth, stages, layout,
        )  # fmt: skip
        if start < end:
            if has_weights:
                factor = gl.expand_dims(gl.load(row_weights + place, mask=live, other=0.0), 1)
                left *= factor
                right *= factor
            row = start + gl.arange(0, HALF, gl.SliceLayout(1, stored))
            mask = row < end
            goal = gl.load(target + row, mask=mask, other=0) if has_target else row
            column = index * (2 * WIDE) + gl.arange(0, WIDE, gl.SliceLayout(0, stored))
            where = out + gl.expand_dims(goal.to(gl.int64) * out_stride, 1) + gl.expand_dims(column, 0)
            mask = gl.expand_dims(mask, 1)
            gl.store(where, gl.convert_layout(left.to(out.dtype.element_ty), stored), mask=mask)
            gl.store(where + WIDE, gl.convert_layout(right.to(out.dtype.element_ty), stored), mask=mask)
        slot += 1
        tile = _next_tile(tickets, ready, free, slot)


@gluon.jit
def _ring(rows, weight, stages: gl.constexpr):
    row_stages = gl.allocate_shared_memory(gl.float8e4nv, [2 * stages, HALF, WIDE], rows.layout)
    a_stages = gl.allocate_shared_memory(gl.float8e4nv, [stages, WIDE, WIDE], weight.layout)
    b_stages = gl.allocate_shared_memory(gl.float8e4nv, [stages, WIDE, WIDE], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return row_stages, a_stages, b_stages, full, empty


@gluon.jit
def _queue():
    tickets = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(TICKETS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    return tickets, ready, free


@gluon.jit(do_not_specialize=["max_blocks", "row_scale_stride", "act_scale_stride"])
def pipelined_gate_up_kernel(
    rows, row_scales, weight, weight_scales, act, act_scales, blocks, block_count, counter, max_blocks,
    row_scale_stride, act_scale_stride, depth: gl.constexpr, inter: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """act[p], act_scales[:, p] = quantised silu(gate rows[p]) * (up rows[p]); see ``grouped_gemm``."""
    tiles: gl.constexpr = inter // WIDE
    total = gl.load(block_count) * tiles
    cuts = (blocks, max_blocks)
    ring = _ring(rows, weight, stages)
    queue = _queue()
    gl.warp_specialize(
        [
            (_gate_up_tiles, (ring, queue, row_scales, weight_scales, act,
                              act_scales, cuts, total, row_scale_stride, act_scale_stride, 0, depth, inter,
                              stages)),
            (_gate_up_tiles, (ring, queue, row_scales, weight_scales, act,
                              act_scales, cuts, total, row_scale_stride, act_scale_stride, 1, depth, inter,
                              stages)),
            (_feed, (rows, weight, ring, queue, counter, cuts, total,
                     tiles, depth, 2 * inter, WIDE, inter, stages)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["max_blocks", "row_scale_stride"])
def pipelined_down_kernel(
    rows, row_scales, weight, weight_scales, out, target, row_weights,
    blocks, block_count, counter, max_blocks, row_scale_stride, out_stride,
    depth: gl.constexpr, hidden: gl.constexpr, stages: gl.constexpr,
    has_target: gl.constexpr, has_weights: gl.constexpr,
):  # fmt: skip
    """out[target[p]] = row_weights[p] * down rows[p]; see ``grouped_gemm``."""
    tiles: gl.constexpr = hidden // (2 * WIDE)
    total = gl.load(block_count) * tiles
    cuts = (blocks, max_blocks)
    ring = _ring(rows, weight, stages)
    queue = _queue()
    gl.warp_specialize(
        [
            (_down_tiles, (ring, queue, row_scales, weight_scales, out, target,
                           row_weights, cuts, total, row_scale_stride, out_stride, 0, depth, hidden, stages,
                           has_target, has_weights)),
            (_down_tiles, (ring, queue, row_scales, weight_scales, out, target,
                           row_weights, cuts, total, row_scale_stride, out_stride, 1, depth, hidden, stages,
                           has_target, has_weights)),
            (_feed, (rows, weight, ring, queue, counter, cuts, total,
                     tiles, depth, hidden, 2 * WIDE, WIDE, stages)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
