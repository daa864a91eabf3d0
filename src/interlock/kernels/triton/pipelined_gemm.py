"""The grouped GEMM of an MoE layer for many tokens, fp8: bound by the matrix units.

Persistent programs of three roles: one warp feeds a ring of shared-memory stages through the bulk copy
engine, two groups of four warps each multiply 64 token rows by 256 weight rows. The two groups run
unsynchronised, so one scales its partial sums (float32 registers) while the other keeps the matrix units
busy.

Tiles are handed out by a counter in device memory, so that programs which share weights start together; a
fixed assignment lets them drift apart, and the weights then come from memory several times (measured on an
H200: 17 GB read for 4 GB of weights).

A tile is 128 places by two blocks of 128 columns. Rows arrive sorted by place. A group whose 64 rows are all
dead multiplies nothing.

Legend: P places, B row blocks of 128, E experts, N weight rows of an expert, K depth.
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
def _tile_at(tile, tiles: gl.constexpr, blocks, max_blocks):
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
    tiles: gl.constexpr, depth: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    row_stages, a_stages, b_stages, full, empty = ring
    tickets, ready, free = queue
    count = 0
    slot = 0
    tile = gl.atomic_add(counter, 1)
    while tile < total:
        _announce(tickets, ready, free, slot, tile)
        following = gl.atomic_add(counter, 1)
        expert, index, first, end = _tile_at(tile, tiles, cuts[0], cuts[1])
        weight_row = (expert * tiles + index) * (2 * WIDE)
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
                weight, [weight_row + WIDE, step * WIDE], bar, b_stages.index(stage)
            )
            count += 1
        slot += 1
        tile = following
    _announce(tickets, ready, free, slot, tile)


@gluon.jit
def _product(rows, weight, start: gl.constexpr, zeros):
    """rows [64, 128] in registers times 64 columns of ``weight`` [128, 128] from ``start`` on."""
    columns = weight.slice(start, HALF, 0).permute((1, 0))
    return warpgroup_mma(rows, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _multiply(
    ring, row_scales, rows_at, weight_scales, scales_at, count, alive,
    row_scale_stride, scale_step: gl.constexpr, group: gl.constexpr, depth: gl.constexpr, stages:
    gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows by two blocks of 128 columns -> four float32 [64, 64], left to right.

    Rows are loaded into registers once a step (products with both operands in shared memory would read them
    four times), and two products of 64 x 64 are in flight. Scales of the next step are loaded a step ahead.
    """
    row_stages, a_stages, b_stages, full, empty = ring
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    zeros = gl.zeros([HALF, HALF], gl.float32, layout)
    a0 = zeros
    a1 = zeros
    b0 = zeros
    b1 = zeros
    steps: gl.constexpr = depth // WIDE
    row_scale = gl.load(row_scales + rows_at)
    a_scale = gl.load(weight_scales + scales_at)
    b_scale = gl.load(weight_scales + scale_step + scales_at)
    for step in range(steps):
        stage = count % stages
        mbarrier.wait(full.index(stage), count // stages & 1)
        if alive:
            rows = row_stages.index(2 * stage + group).load(operand)
            wa = a_stages.index(stage)
            wb = b_stages.index(stage)
            p0 = _product(rows, wa, 0, zeros)
            p1 = _product(rows, wa, HALF, zeros)
            following = gl.minimum(step + 1, steps - 1)
            next_row_scale = gl.load(row_scales + following.to(gl.int64) * row_scale_stride + rows_at)
            next_a_scale = gl.load(weight_scales + scales_at + following)
            next_b_scale = gl.load(weight_scales + scale_step + scales_at + following)
            scale = gl.expand_dims(row_scale * a_scale, 1)
            p0 = warpgroup_mma_wait(1, deps=[p0])
            a0 += p0 * scale
            q0 = _product(rows, wb, 0, zeros)
            p1 = warpgroup_mma_wait(1, deps=[p1])
            a1 += p1 * scale
            q1 = _product(rows, wb, HALF, zeros)
            scale = gl.expand_dims(row_scale * b_scale, 1)
            q0 = warpgroup_mma_wait(1, deps=[q0])
            b0 += q0 * scale
            q1 = warpgroup_mma_wait(0, deps=[q1])
            b1 += q1 * scale
            row_scale = next_row_scale
            a_scale = next_a_scale
            b_scale = next_b_scale
        mbarrier.arrive(empty.index(stage))
        count += 1
    return a0, a1, b0, b1, count


@gluon.jit
def _tiles(
    ring, queue, row_scales, weight_scales, out, target, row_weights, cuts, total,
    row_scale_stride, out_stride, group: gl.constexpr, depth: gl.constexpr, width: gl.constexpr,
    stages: gl.constexpr, has_target: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    groups: gl.constexpr = depth // WIDE
    tiles: gl.constexpr = width // (2 * WIDE)
    tickets, ready, free = queue
    count = 0
    slot = 0
    tile = _next_tile(tickets, ready, free, slot)
    while tile < total:
        expert, index, first, end = _tile_at(tile, tiles, cuts[0], cuts[1])
        start = first + group * HALF
        place = start + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        live = place < end
        left0, left1, right0, right1, count = _multiply(
            ring, row_scales, gl.where(live, place, first),
            weight_scales, (expert * tiles + index) * (2 * groups), count, start < end, row_scale_stride,
            groups, group, depth, stages, layout,
        )  # fmt: skip
        if start < end:
            factor = gl.expand_dims(gl.load(row_weights + place, mask=live, other=0.0), 1)
            left0 *= factor
            left1 *= factor
            right0 *= factor
            right1 *= factor
            row = start + gl.arange(0, HALF, gl.SliceLayout(1, stored))
            mask = row < end
            goal = gl.load(target + row, mask=mask, other=0) if has_target else row
            column = index * (2 * WIDE) + gl.arange(0, HALF, gl.SliceLayout(0, stored))
            where = out + gl.expand_dims(goal.to(gl.int64) * out_stride, 1) + gl.expand_dims(column, 0)
            mask = gl.expand_dims(mask, 1)
            gl.store(where, gl.convert_layout(left0.to(out.dtype.element_ty), stored), mask=mask)
            gl.store(where + HALF, gl.convert_layout(left1.to(out.dtype.element_ty), stored), mask=mask)
            gl.store(where + WIDE, gl.convert_layout(right0.to(out.dtype.element_ty), stored), mask=mask)
            gl.store(
                where + WIDE + HALF, gl.convert_layout(right1.to(out.dtype.element_ty), stored), mask=mask
            )
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


@gluon.jit(do_not_specialize=["max_blocks", "row_scale_stride"])
def pipelined_kernel(
    rows, row_scales, weight, weight_scales, out, target, row_weights,
    blocks, block_count, counter, max_blocks, row_scale_stride, out_stride,
    depth: gl.constexpr, width: gl.constexpr, stages: gl.constexpr, has_target: gl.constexpr,
):  # fmt: skip
    """out[target[p]] = row_weights[p] * (weight of p's expert) rows[p] for every listed place p.

    rows e4m3 [P, K] and weight e4m3 [E * N, K] as descriptors, row_scales float32 [K / 128, P], weight_scales
    float32 [E, N / 128, K / 128]; row_weights float32 [P] (compiled without them, the loop's sums spill).
    """
    tiles: gl.constexpr = width // (2 * WIDE)
    total = gl.load(block_count) * tiles
    cuts = (blocks, max_blocks)
    ring = _ring(rows, weight, stages)
    queue = _queue()
    gl.warp_specialize(
        [
            (_tiles, (ring, queue, row_scales, weight_scales, out, target, row_weights, cuts, total,
                      row_scale_stride, out_stride, 0, depth, width, stages, has_target)),
            (_tiles, (ring, queue, row_scales, weight_scales, out, target, row_weights, cuts, total,
                      row_scale_stride, out_stride, 1, depth, width, stages, has_target)),
            (_feed, (rows, weight, ring, queue, counter, cuts, total, tiles, depth, stages)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
