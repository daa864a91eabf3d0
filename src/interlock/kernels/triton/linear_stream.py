"""A dense GEMM for few rows: bound by reading the weight, which streams through a ring of shared-memory
stages.

One warp feeds the ring through the bulk copy engine and never waits for arithmetic; one group of four warps
multiplies. A program owns ``block_n`` result columns for one block of rows and one share of K. A stage holds
``boxes`` boxes of 128 bytes of K for the weight rows and for the rows of x.

``weights_first``: weight rows are the first operand (64 rows of a matrix instruction), x rows the second.
Otherwise x rows are the first operand, padded to 64 with whatever shared memory holds (rows of a product do
not mix), so that ``block_n`` may be 32 and a narrow weight still gives every multiprocessor a program.

fp8: products of 128 channels are summed in the matrix unit, scaled by (weight block scale * row group scale)
and accumulated in float32 registers. Legend: N result columns, K depth, n rows of x.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait


@gluon.jit
def _copy_weight(
    weight, ring, step, column, at, box: gl.constexpr, boxes: gl.constexpr, stages: gl.constexpr
):
    _row_boxes, weight_boxes, full, _empty = ring
    stage = step % stages
    for index in gl.static_range(boxes):
        tma.async_copy_global_to_shared(
            weight, [column, at + index * box], full.index(stage), weight_boxes.index(stage * boxes + index)
        )


@gluon.jit
def _copy_rows(
    rows, ring, step, first, at,
    block_rows: gl.constexpr, box: gl.constexpr, boxes: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    row_boxes, _weight_boxes, full, _empty = ring
    stage = step % stages
    for index in gl.static_range(boxes):
        held = row_boxes.index(stage * boxes + index)
        if held.shape[0] != block_rows:
            held = held.slice(0, block_rows)
        tma.async_copy_global_to_shared(rows, [first, at + index * box], full.index(stage), held)


@gluon.jit
def _feed(
    rows, weight, ring, first, column, begin, steps: gl.constexpr,
    block_rows: gl.constexpr, box_bytes: gl.constexpr, box: gl.constexpr, boxes: gl.constexpr,
    stages: gl.constexpr, early: gl.constexpr,
):  # fmt: skip
    _row_boxes, _weight_boxes, full, empty = ring
    ahead: gl.constexpr = (stages if stages < steps else steps) if early else 0
    for step in range(ahead):
        mbarrier.expect(full.index(step), boxes * box_bytes)
        _copy_weight(weight, ring, step, column, (begin + step * boxes) * box, box, boxes, stages)
    if early:
        gdc_wait()
    for step in range(ahead):
        _copy_rows(rows, ring, step, first, (begin + step * boxes) * box, block_rows, box, boxes, stages)
    for step in range(ahead, steps):
        stage = step % stages
        mbarrier.wait(empty.index(stage), (step // stages & 1) ^ 1)
        mbarrier.expect(full.index(stage), boxes * box_bytes)
        at = (begin + step * boxes) * box
        _copy_weight(weight, ring, step, column, at, box, boxes, stages)
        _copy_rows(rows, ring, step, first, at, block_rows, box, boxes, stages)


@gluon.jit
def _product(row_boxes, weight_boxes, slot, start, accumulate: gl.constexpr, weights_first: gl.constexpr):
    weight = weight_boxes.index(slot)
    rows = row_boxes.index(slot)
    if weights_first:
        part = warpgroup_mma(weight, rows.permute((1, 0)), start, use_acc=accumulate, is_async=True)
    else:
        part = warpgroup_mma(rows, weight.permute((1, 0)), start, use_acc=accumulate, is_async=True)
    return part


@gluon.jit
def _scaled_sum(
    ring, total, row_scales, weight_scales, begin, steps, scale_stride, boxes: gl.constexpr,
    stages: gl.constexpr, weights_first: gl.constexpr,
):  # fmt: skip
    """row_scales: pointers to the scales of this block's rows in group 0; weight_scales: to group 0's."""
    row_boxes, weight_boxes, full, empty = ring
    zeros = total
    axis: gl.constexpr = 0 if weights_first else 1
    stride = scale_stride.to(gl.int64)
    at = begin
    row_0 = gl.load(row_scales + at * stride)
    row_1 = gl.load(row_scales + (at + 1) * stride)
    weight_0 = gl.load(weight_scales + at)
    weight_1 = gl.load(weight_scales + at + 1)
    if boxes == 4:
        row_2 = gl.load(row_scales + (at + 2) * stride)
        row_3 = gl.load(row_scales + (at + 3) * stride)
        weight_2 = gl.load(weight_scales + at + 2)
        weight_3 = gl.load(weight_scales + at + 3)
    for step in range(steps):
        at = begin + gl.minimum(step + 1, steps - 1) * boxes
        next_row_0 = gl.load(row_scales + at * stride)
        next_row_1 = gl.load(row_scales + (at + 1) * stride)
        next_weight_0 = gl.load(weight_scales + at)
        next_weight_1 = gl.load(weight_scales + at + 1)
        if boxes == 4:
            next_row_2 = gl.load(row_scales + (at + 2) * stride)
            next_row_3 = gl.load(row_scales + (at + 3) * stride)
            next_weight_2 = gl.load(weight_scales + at + 2)
            next_weight_3 = gl.load(weight_scales + at + 3)
        stage = step % stages
        slot = stage * boxes
        mbarrier.wait(full.index(stage), step // stages & 1)
        part_0 = _product(row_boxes, weight_boxes, slot, zeros, False, weights_first)
        part_1 = _product(row_boxes, weight_boxes, slot + 1, zeros, False, weights_first)
        part_0, part_1 = warpgroup_mma_wait(0, deps=[part_0, part_1])
        total += part_0 * gl.expand_dims(row_0 * weight_0, axis)
        total += part_1 * gl.expand_dims(row_1 * weight_1, axis)
        if boxes == 4:
            part_0 = _product(row_boxes, weight_boxes, slot + 2, zeros, False, weights_first)
            part_1 = _product(row_boxes, weight_boxes, slot + 3, zeros, False, weights_first)
            part_0, part_1 = warpgroup_mma_wait(0, deps=[part_0, part_1])
            total += part_0 * gl.expand_dims(row_2 * weight_2, axis)
            total += part_1 * gl.expand_dims(row_3 * weight_3, axis)
            row_2 = next_row_2
            row_3 = next_row_3
            weight_2 = next_weight_2
            weight_3 = next_weight_3
        mbarrier.arrive(empty.index(stage))
        row_0 = next_row_0
        row_1 = next_row_1
        weight_0 = next_weight_0
        weight_1 = next_weight_1
    return total


@gluon.jit
def _plain_sum(ring, total, steps, boxes: gl.constexpr, stages: gl.constexpr, weights_first: gl.constexpr):
    row_boxes, weight_boxes, full, empty = ring
    for step in range(steps):
        stage = step % stages
        mbarrier.wait(full.index(stage), step // stages & 1)
        part = _product(row_boxes, weight_boxes, stage * boxes, total, True, weights_first)
        for index in gl.static_range(1, boxes):
            part = _product(row_boxes, weight_boxes, stage * boxes + index, part, True, weights_first)
        total = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage))
    return total


@gluon.jit
def _multiply(
    ring, row_scales, weight_scales, out, first, column, begin, steps, rows, scale_stride, out_stride,
    groups: gl.constexpr, width: gl.constexpr, block_rows: gl.constexpr, block_n: gl.constexpr,
    boxes: gl.constexpr, stages: gl.constexpr, fp8: gl.constexpr, weights_first: gl.constexpr,
    early: gl.constexpr,
):  # fmt: skip
    if early:
        gdc_wait()
    depth: gl.constexpr = 32 if fp8 else 16
    seconds: gl.constexpr = block_rows if weights_first else block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, seconds, depth])
    if weights_first:
        total = gl.zeros([block_n, block_rows], gl.float32, layout)
        row = first + gl.arange(0, block_rows, gl.SliceLayout(0, layout))
    else:
        total = gl.zeros([64, block_n], gl.float32, layout)
        row = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if fp8:
        total = _scaled_sum(
            ring, total, row_scales + gl.where(row < rows, row, first),
            weight_scales + column // 128 * groups, begin, steps, scale_stride, boxes, stages, weights_first,
        )  # fmt: skip
    else:
        total = _plain_sum(ring, total, steps, boxes, stages, weights_first)
    by_column: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    by_row: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    stored: gl.constexpr = by_column if weights_first else by_row
    result = gl.convert_layout(total.to(out.dtype.element_ty), stored)
    if weights_first:
        row = first + gl.arange(0, block_rows, gl.SliceLayout(0, stored))
        where_column = column + gl.arange(0, block_n, gl.SliceLayout(1, stored))
        where = gl.expand_dims(row.to(gl.int64) * out_stride, 0) + gl.expand_dims(where_column, 1)
        mask = gl.expand_dims(row < rows, 0) & gl.expand_dims(where_column < width, 1)
    else:
        inside = gl.arange(0, 64, gl.SliceLayout(1, stored))
        where_column = column + gl.arange(0, block_n, gl.SliceLayout(0, stored))
        row = first + inside
        where = gl.expand_dims(row.to(gl.int64) * out_stride, 1) + gl.expand_dims(where_column, 0)
        mask = gl.expand_dims((row < rows) & (inside < block_rows), 1)
        mask = mask & gl.expand_dims(where_column < width, 0)
    gl.store(out + where, result, mask=mask)


@gluon.jit(do_not_specialize=["row_count", "scale_stride", "split_stride"])
def stream_kernel(
    rows, row_scales, weight, weight_scales, out, row_count, scale_stride, out_stride, split_stride,
    depth: gl.constexpr, width: gl.constexpr, block_rows: gl.constexpr, block_n: gl.constexpr,
    splits: gl.constexpr, boxes: gl.constexpr, stages: gl.constexpr, fp8: gl.constexpr,
    weights_first: gl.constexpr, early: gl.constexpr,
):  # fmt: skip
    """out[split, r, :] = x[r, share] @ weight[:, share].T.

    Args:
        rows: descriptor over x [n, K], boxes [block_rows, 128 bytes]; row_scales [K / 128, n] with e4m3.
        weight: descriptor over [N, K], boxes [block_n, 128 bytes]; weight_scales float32 [N / 128, K / 128].
        out: [splits, n, N]; K is a multiple of splits * boxes * (128 bytes).
        early: launched while the kernel before still runs; the weight, which no kernel writes, is read
            ahead, and all else waits for that kernel's end.
    """
    box: gl.constexpr = 128 if fp8 else 64
    tiles: gl.constexpr = (width + block_n - 1) // block_n
    steps: gl.constexpr = depth // (box * boxes * splits)
    column = gl.program_id(0) % tiles * block_n
    first = gl.program_id(0) // tiles * block_rows
    split = gl.program_id(1)
    begin = split * (steps * boxes)
    held_rows: gl.constexpr = block_rows if weights_first else 64
    row_boxes = gl.allocate_shared_memory(rows.dtype, [stages * boxes, held_rows, box], rows.layout)
    weight_boxes = gl.allocate_shared_memory(rows.dtype, [stages * boxes, block_n, box], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    ring = (row_boxes, weight_boxes, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (ring, row_scales, weight_scales, out + split.to(gl.int64) * split_stride,
                         first, column, begin, steps, row_count, scale_stride, out_stride,
                         depth // 128, width, block_rows, block_n, boxes, stages, fp8, weights_first, early)),
            (_feed, (rows, weight, ring, first, column, begin, steps,
                     block_rows, (block_rows + block_n) * 128, box, boxes, stages, early)),
        ],
        [1],
        [24],
    )  # fmt: skip
