"""The grouped GEMM of an MoE layer for few rows an expert, fp8: bound by reading the weights.

Persistent programs of two roles: one warp streams weights through a ring of shared-memory stages by the bulk
copy engine, from tile to tile without a pause; one group of four warps multiplies. So neither a tile's end
(SwiGLU, quantisation, stores) nor the next one's beginning leaves the memory idle, which costs programs of
one tile each about 5 % of the bandwidth.

A tile is one block of rows by two blocks of 128 weight rows: gate and up of the same 128 channels, or 256
neighbouring columns of down. Weights are the first operand (64 rows of a matrix instruction), rows the
second. Tiles are handed out by a counter, since programs do not read equally fast. Rows arrive in order of
places.

Legend: P places, B row blocks, E experts, N weight rows of an expert, K depth.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from interlock.kernels.triton.pipelined_gemm import TICKETS, WIDE, announce, next_tile, tile_at

FP8_MAX: gl.constexpr = gl.constexpr(448.0)


@gluon.jit
def _weight_rows(expert, index, width: gl.constexpr, gated: gl.constexpr):
    """First rows of both weight blocks of a tile."""
    first = expert * width + index * (WIDE if gated else 2 * WIDE)
    return first, first + (width // 2 if gated else WIDE)


@gluon.jit
def _copy_weights(weight, ring, stage, rows_a, rows_b, step):
    _row_stages, weight_stages, full, _empty = ring
    bar = full.index(stage)
    tma.async_copy_global_to_shared(weight, [rows_a, step * WIDE], bar, weight_stages.index(2 * stage))
    tma.async_copy_global_to_shared(weight, [rows_b, step * WIDE], bar, weight_stages.index(2 * stage + 1))


@gluon.jit
def _feed(
    rows, weight, ring, queue, counter, cuts, total,
    depth: gl.constexpr, width: gl.constexpr, block_rows: gl.constexpr, stages: gl.constexpr,
    gated: gl.constexpr, early: gl.constexpr,
):  # fmt: skip
    row_stages, _weight_stages, full, empty = ring
    tickets, ready, free = queue
    tiles: gl.constexpr = width // (2 * WIDE)
    stage_bytes: gl.constexpr = (2 * WIDE + block_rows) * WIDE
    ahead: gl.constexpr = (stages if stages < depth // WIDE else depth // WIDE) if early else 0
    count = 0
    slot = 0
    done = 0
    tile = gl.atomic_add(counter, 1)
    if early:
        if tile < total:
            expert, index, first, _end = tile_at(tile, tiles, cuts[0], cuts[1])
            rows_a, rows_b = _weight_rows(expert, index, width, gated)
            for step in gl.static_range(ahead):
                mbarrier.expect(full.index(step), stage_bytes)
                _copy_weights(weight, ring, step, rows_a, rows_b, step)
        gdc_wait()
        if tile < total:
            _expert, _index, first, _end = tile_at(tile, tiles, cuts[0], cuts[1])
            for step in gl.static_range(ahead):
                tma.async_copy_global_to_shared(
                    rows, [first, step * WIDE], full.index(step), row_stages.index(step)
                )
        count += ahead
        done += ahead
    while tile < total:
        announce(tickets, ready, free, slot, tile)
        following = gl.atomic_add(counter, 1)
        expert, index, first, _end = tile_at(tile, tiles, cuts[0], cuts[1])
        rows_a, rows_b = _weight_rows(expert, index, width, gated)
        for step in range(done, depth // WIDE):
            stage = count % stages
            mbarrier.wait(empty.index(stage), (count // stages & 1) ^ 1)
            mbarrier.expect(full.index(stage), stage_bytes)
            _copy_weights(weight, ring, stage, rows_a, rows_b, step)
            tma.async_copy_global_to_shared(
                rows, [first, step * WIDE], full.index(stage), row_stages.index(stage)
            )
            count += 1
        done = 0
        slot += 1
        tile = following
    announce(tickets, ready, free, slot, tile)


@gluon.jit
def _multiply(
    ring, row_scales, weight_scales, scale_gap: gl.constexpr, count, row_scale_stride,
    depth: gl.constexpr, block_rows: gl.constexpr, stages: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Two blocks of 128 weight rows by the tile's rows -> two float32 [128, block rows].

    row_scales: pointers to the scales of the rows in group 0; weight_scales: to the first block's.
    """
    row_stages, weight_stages, full, empty = ring
    steps: gl.constexpr = depth // WIDE
    zeros = gl.zeros([WIDE, block_rows], gl.float32, layout)
    a = zeros
    b = zeros
    row_scale = gl.load(row_scales)
    a_scale = gl.load(weight_scales)
    b_scale = gl.load(weight_scales + scale_gap)
    for step in range(steps):
        following = gl.minimum(step + 1, steps - 1)
        next_row_scale = gl.load(row_scales + following.to(gl.int64) * row_scale_stride)
        next_a_scale = gl.load(weight_scales + following)
        next_b_scale = gl.load(weight_scales + scale_gap + following)
        stage = count % stages
        mbarrier.wait(full.index(stage), count // stages & 1)
        tokens = row_stages.index(stage).permute((1, 0))
        p = warpgroup_mma(weight_stages.index(2 * stage), tokens, zeros, use_acc=False, is_async=True)
        q = warpgroup_mma(weight_stages.index(2 * stage + 1), tokens, zeros, use_acc=False, is_async=True)
        p, q = warpgroup_mma_wait(0, deps=[p, q])
        mbarrier.arrive(empty.index(stage))
        a += p * gl.expand_dims(row_scale * a_scale, 0)
        b += q * gl.expand_dims(row_scale * b_scale, 0)
        row_scale = next_row_scale
        a_scale = next_a_scale
        b_scale = next_b_scale
        count += 1
    return a, b, count


@gluon.jit
def _store_activation(
    a, b, out, out_scales, out_scale_stride, index, first, end, inter: gl.constexpr,
    block_rows: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """silu(a) * b of 128 channels, quantised with one scale a row."""
    stored: gl.constexpr = gl.BlockedLayout([16, 1], [8, 4], [1, 4], [0, 1])
    value = a / (1.0 + gl.exp(-a)) * b
    scale = gl.maximum(gl.max(gl.abs(value), axis=0), 1e-12) / FP8_MAX
    scaled = value / gl.expand_dims(scale, 0)
    quantised = gl.minimum(gl.maximum(scaled, -FP8_MAX), FP8_MAX).to(gl.float8e4nv)
    place = first + gl.arange(0, block_rows, gl.SliceLayout(0, layout))
    gl.store(out_scales + index.to(gl.int64) * out_scale_stride + place, scale, mask=place < end)
    row = first + gl.arange(0, block_rows, gl.SliceLayout(0, stored))
    column = index * WIDE + gl.arange(0, WIDE, gl.SliceLayout(1, stored))
    where = out + gl.expand_dims(row.to(gl.int64) * inter, 0) + gl.expand_dims(column, 1)
    gl.store(where, gl.convert_layout(quantised, stored), mask=gl.expand_dims(row < end, 0))


@gluon.jit
def _store_result(
    a, b, out, out_stride, target, row_weights, index, first, end, block_rows: gl.constexpr,
    has_target: gl.constexpr, has_weights: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """256 columns of each row, weighted, rounded once."""
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    if has_weights:
        place = first + gl.arange(0, block_rows, gl.SliceLayout(0, layout))
        factor = gl.expand_dims(gl.load(row_weights + place, mask=place < end, other=0.0), 0)
        a *= factor
        b *= factor
    row = first + gl.arange(0, block_rows, gl.SliceLayout(0, stored))
    goal = gl.load(target + row, mask=row < end, other=0) if has_target else row
    column = index * (2 * WIDE) + gl.arange(0, WIDE, gl.SliceLayout(1, stored))
    where = out + gl.expand_dims(goal.to(gl.int64) * out_stride, 0) + gl.expand_dims(column, 1)
    mask = gl.expand_dims(row < end, 0)
    gl.store(where, gl.convert_layout(a.to(out.dtype.element_ty), stored), mask=mask)
    gl.store(where + WIDE, gl.convert_layout(b.to(out.dtype.element_ty), stored), mask=mask)


@gluon.jit
def _tiles(
    ring, queue, row_scales, weight_scales, out, out_scales, target, row_weights, cuts, total,
    row_scale_stride, out_stride, out_scale_stride,
    depth: gl.constexpr, width: gl.constexpr, block_rows: gl.constexpr, stages: gl.constexpr,
    gated: gl.constexpr, has_target: gl.constexpr, has_weights: gl.constexpr, early: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_rows, 32])
    groups: gl.constexpr = depth // WIDE
    tiles: gl.constexpr = width // (2 * WIDE)
    tickets, ready, free = queue
    if early:
        gdc_wait()
        gdc_launch_dependents()
    count = 0
    slot = 0
    tile = next_tile(tickets, ready, free, slot)
    while tile < total:
        expert, index, first, end = tile_at(tile, tiles, cuts[0], cuts[1])
        place = first + gl.arange(0, block_rows, gl.SliceLayout(0, layout))
        block = expert * (2 * tiles) + (index if gated else 2 * index)
        a, b, count = _multiply(
            ring, row_scales + gl.where(place < end, place, first), weight_scales + block * groups,
            tiles * groups if gated else groups, count, row_scale_stride, depth, block_rows, stages, layout,
        )  # fmt: skip
        if gated:
            _store_activation(
                a, b, out, out_scales, out_scale_stride, index, first, end, width // 2, block_rows, layout
            )
        else:
            _store_result(
                a, b, out, out_stride, target, row_weights, index, first, end, block_rows,
                has_target, has_weights, layout,
            )  # fmt: skip
        slot += 1
        tile = next_tile(tickets, ready, free, slot)


@gluon.jit(do_not_specialize=["max_blocks", "row_scale_stride", "out_scale_stride"])
def streamed_kernel(
    rows, row_scales, weight, weight_scales, out, out_scales, target, row_weights,
    blocks, block_count, counter, max_blocks, row_scale_stride, out_stride, out_scale_stride,
    depth: gl.constexpr, width: gl.constexpr, block_rows: gl.constexpr, stages: gl.constexpr,
    gated: gl.constexpr, has_target: gl.constexpr, has_weights: gl.constexpr, early: gl.constexpr,
):  # fmt: skip
    """gated: out[p] = quantised silu(gate rows[p]) * (up rows[p]), e4m3 [P, N / 2], out_scales [N / 256, P];
    else out[target[p]] = row_weights[p] * (weight of p's expert) rows[p] for every listed place p.

    Args:
        rows: descriptor over e4m3 [P, K], boxes [block rows, 128]; row_scales float32 [K / 128, P].
        weight: descriptor over e4m3 [E * N, K], boxes [128, 128].
        weight_scales: float32 [E, N / 128, K / 128].
        counter: int32 [1], zero.
        early: launched while the kernel before still runs; weights, which no kernel writes, are read ahead,
            by lists which the kernels before that one have made.
    """
    tiles: gl.constexpr = width // (2 * WIDE)
    total = gl.load(block_count) * tiles
    cuts = (blocks, max_blocks)
    row_stages = gl.allocate_shared_memory(gl.float8e4nv, [stages, block_rows, WIDE], rows.layout)
    weight_stages = gl.allocate_shared_memory(gl.float8e4nv, [2 * stages, WIDE, WIDE], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    tickets = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(TICKETS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    ring = (row_stages, weight_stages, full, empty)
    queue = (tickets, ready, free)
    gl.warp_specialize(
        [
            (_tiles, (ring, queue, row_scales, weight_scales, out, out_scales, target, row_weights, cuts,
                      total, row_scale_stride, out_stride, out_scale_stride, depth, width, block_rows, stages,
                      gated, has_target, has_weights, early)),
            (_feed, (rows, weight, ring, queue, counter, cuts, total, depth, width, block_rows, stages, gated,
                     early)),
        ],
        [1],
        [40],
    )  # fmt: skip
