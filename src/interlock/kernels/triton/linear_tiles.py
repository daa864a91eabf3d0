"""A dense block-fp8 GEMM for many rows: bound by the matrix units.

Persistent programs of three roles, as in ``pipelined_gemm``: one warp feeds a ring of shared-memory stages,
two groups of four warps each multiply 64 rows of x by the columns of the tile, unsynchronised, so that one
scales its partial sums while the other keeps the matrix units busy. A tile is 128 rows by 128 or 256
columns; tiles are handed out in a fixed order, bands of row blocks with columns outside, so that what runs
together shares x and weights in L2.

A product is 64 x 128 and waits for its own scaling; with ``from_registers`` the rows of x are loaded into
registers once a step, and products are 64 x 64, two in flight, so that one group alone can keep the matrix
units busy, and shared memory is read less. Every product starts from one that was used, because products
that start from a fresh zero get other registers, and the sums then spill (96 spills a step of 256 columns).

Legend: n rows of x, N result columns, K depth.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

HALF: gl.constexpr = gl.constexpr(64)
WIDE: gl.constexpr = gl.constexpr(128)


@gluon.jit
def _place(tile, row_blocks, tiles: gl.constexpr, band: gl.constexpr):
    """(first row, column tile): ``band`` row blocks side by side, then the next column tile."""
    start = tile // (band * tiles) * band
    size = gl.minimum(row_blocks - start, band)
    inside = tile - start * tiles
    return (start + inside % size) * WIDE, inside // size


@gluon.jit
def _feed(
    rows, weight, ring, row_count, row_blocks,
    tiles: gl.constexpr, depth: gl.constexpr, columns: gl.constexpr, box_rows: gl.constexpr,
    band: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    row_stages, weight_stages, full, empty = ring
    boxes: gl.constexpr = columns // box_rows
    count = 0
    for tile in range(gl.program_id(0), row_blocks * tiles, gl.num_programs(0)):
        first, index = _place(tile, row_blocks, tiles, band)
        both = first + HALF < row_count
        for step in range(depth // WIDE):
            stage = count % stages
            mbarrier.wait(empty.index(stage), (count // stages & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (columns + 128) * 128, pred=both)
            mbarrier.expect(bar, (columns + 64) * 128, pred=both == 0)
            tma.async_copy_global_to_shared(rows, [first, step * WIDE], bar, row_stages.index(2 * stage))
            for box in gl.static_range(boxes):
                tma.async_copy_global_to_shared(
                    weight, [index * columns + box * box_rows, step * WIDE], bar,
                    weight_stages.index(stage * boxes + box),
                )  # fmt: skip
            tma.async_copy_global_to_shared(
                rows, [first + HALF, step * WIDE], bar, row_stages.index(2 * stage + 1), pred=both
            )
            count += 1


@gluon.jit
def _product(rows, weight, last):
    """``last``, a product that was used, gives its registers."""
    return warpgroup_mma(rows, weight.permute((1, 0)), last, use_acc=False, is_async=True)


@gluon.jit
def _sums(
    ring, row_scales, weight_scales, count, scale_stride, group: gl.constexpr, depth: gl.constexpr,
    columns: gl.constexpr, stages: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows by one or two blocks of 128 columns (the second is zero with one), products of 64 x 128."""
    row_stages, weight_stages, full, empty = ring
    boxes: gl.constexpr = columns // 128
    steps: gl.constexpr = depth // WIDE
    zeros = gl.zeros([HALF, WIDE], gl.float32, layout)
    left = zeros
    right = zeros
    part = zeros
    row_scale = gl.load(row_scales)
    left_scale = gl.load(weight_scales)
    if boxes == 2:
        right_scale = gl.load(weight_scales + steps)
    for step in range(steps):
        stage = count % stages
        mbarrier.wait(full.index(stage), count // stages & 1)
        rows = row_stages.index(2 * stage + group)
        part = _product(rows, weight_stages.index(stage * boxes), part)
        following = gl.minimum(step + 1, steps - 1)
        next_row_scale = gl.load(row_scales + following.to(gl.int64) * scale_stride)
        next_left_scale = gl.load(weight_scales + following)
        if boxes == 2:
            next_right_scale = gl.load(weight_scales + steps + following)
        part = warpgroup_mma_wait(0, deps=[part])
        left += part * gl.expand_dims(row_scale * left_scale, 1)
        if boxes == 2:
            part = _product(rows, weight_stages.index(stage * boxes + 1), part)
            part = warpgroup_mma_wait(0, deps=[part])
            right += part * gl.expand_dims(row_scale * right_scale, 1)
            right_scale = next_right_scale
        mbarrier.arrive(empty.index(stage))
        row_scale = next_row_scale
        left_scale = next_left_scale
        count += 1
    return left, right, count


@gluon.jit
def _sums_from_registers(
    ring, row_scales, weight_scales, count, scale_stride, group: gl.constexpr, depth: gl.constexpr,
    stages: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows by four blocks of 64 columns; two products in flight."""
    row_stages, weight_stages, full, empty = ring
    steps: gl.constexpr = depth // WIDE
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    zeros = gl.zeros([HALF, HALF], gl.float32, layout)
    total_0 = zeros
    total_1 = zeros
    total_2 = zeros
    total_3 = zeros
    part_0 = zeros
    part_1 = zeros
    row_scale = gl.load(row_scales)
    left_scale = gl.load(weight_scales)
    right_scale = gl.load(weight_scales + steps)
    for step in range(steps):
        stage = count % stages
        slot = stage * 4
        mbarrier.wait(full.index(stage), count // stages & 1)
        rows = row_stages.index(2 * stage + group).load(operand)
        part_0 = _product(rows, weight_stages.index(slot), part_0)
        part_1 = _product(rows, weight_stages.index(slot + 1), part_1)
        following = gl.minimum(step + 1, steps - 1)
        next_row_scale = gl.load(row_scales + following.to(gl.int64) * scale_stride)
        next_left_scale = gl.load(weight_scales + following)
        next_right_scale = gl.load(weight_scales + steps + following)
        left_factor = gl.expand_dims(row_scale * left_scale, 1)
        right_factor = gl.expand_dims(row_scale * right_scale, 1)
        part_0 = warpgroup_mma_wait(1, deps=[part_0])
        total_0 += part_0 * left_factor
        part_0 = _product(rows, weight_stages.index(slot + 2), part_0)
        part_1 = warpgroup_mma_wait(1, deps=[part_1])
        total_1 += part_1 * left_factor
        part_1 = _product(rows, weight_stages.index(slot + 3), part_1)
        part_0 = warpgroup_mma_wait(1, deps=[part_0])
        total_2 += part_0 * right_factor
        part_1 = warpgroup_mma_wait(0, deps=[part_1])
        mbarrier.arrive(empty.index(stage))
        total_3 += part_1 * right_factor
        row_scale = next_row_scale
        left_scale = next_left_scale
        right_scale = next_right_scale
        count += 1
    return total_0, total_1, total_2, total_3, count


@gluon.jit
def _narrow_sums_from_registers(
    ring, row_scales, weight_scales, count, scale_stride, group: gl.constexpr, depth: gl.constexpr,
    stages: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """64 rows by two blocks of 64 columns, both in flight."""
    row_stages, weight_stages, full, empty = ring
    steps: gl.constexpr = depth // WIDE
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    zeros = gl.zeros([HALF, HALF], gl.float32, layout)
    left = zeros
    right = zeros
    part_0 = zeros
    part_1 = zeros
    row_scale = gl.load(row_scales)
    weight_scale = gl.load(weight_scales)
    for step in range(steps):
        stage = count % stages
        mbarrier.wait(full.index(stage), count // stages & 1)
        rows = row_stages.index(2 * stage + group).load(operand)
        part_0 = _product(rows, weight_stages.index(2 * stage), part_0)
        part_1 = _product(rows, weight_stages.index(2 * stage + 1), part_1)
        following = gl.minimum(step + 1, steps - 1)
        next_row_scale = gl.load(row_scales + following.to(gl.int64) * scale_stride)
        next_weight_scale = gl.load(weight_scales + following)
        factor = gl.expand_dims(row_scale * weight_scale, 1)
        part_0 = warpgroup_mma_wait(1, deps=[part_0])
        left += part_0 * factor
        part_1 = warpgroup_mma_wait(0, deps=[part_1])
        mbarrier.arrive(empty.index(stage))
        right += part_1 * factor
        row_scale = next_row_scale
        weight_scale = next_weight_scale
        count += 1
    return left, right, count


@gluon.jit
def _drain(ring, count, depth: gl.constexpr, stages: gl.constexpr):
    """Let the stages of a tile pass whose rows do not exist for this group."""
    _row_stages, _weight_stages, full, empty = ring
    for _ in range(depth // WIDE):
        stage = count % stages
        mbarrier.wait(full.index(stage), count // stages & 1)
        mbarrier.arrive(empty.index(stage))
        count += 1
    return count


@gluon.jit
def _store(out, total, start, row_count, column, out_stride, width: gl.constexpr):
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    result = gl.convert_layout(total.to(out.dtype.element_ty), stored)
    row = start + gl.arange(0, HALF, gl.SliceLayout(1, stored))
    inside = column + gl.arange(0, total.shape[1], gl.SliceLayout(0, stored))
    where = out + gl.expand_dims(row.to(gl.int64) * out_stride, 1) + gl.expand_dims(inside, 0)
    mask = gl.expand_dims(row < row_count, 1) & gl.expand_dims(inside < width, 0)
    gl.store(where, result, mask=mask)


@gluon.jit
def _multiply_tiles(
    ring, row_scales, weight_scales, out, row_count, row_blocks, scale_stride, out_stride,
    group: gl.constexpr, depth: gl.constexpr, width: gl.constexpr, columns: gl.constexpr,
    from_registers: gl.constexpr, band: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    product: gl.constexpr = 64 if from_registers else 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, product, 32])
    tiles: gl.constexpr = (width + columns - 1) // columns
    groups: gl.constexpr = depth // WIDE
    count = 0
    for tile in range(gl.program_id(0), row_blocks * tiles, gl.num_programs(0)):
        first, index = _place(tile, row_blocks, tiles, band)
        start = first + group * HALF
        column = index * columns
        if start < row_count:
            row = start + gl.arange(0, HALF, gl.SliceLayout(1, layout))
            scales = row_scales + gl.where(row < row_count, row, start)
            column_scales = weight_scales + index * (columns // 128) * groups
            if from_registers and columns == 128:
                left, right, count = _narrow_sums_from_registers(
                    ring, scales, column_scales, count, scale_stride, group, depth, stages, layout
                )
                _store(out, left, start, row_count, column, out_stride, width)
                _store(out, right, start, row_count, column + 64, out_stride, width)
            elif from_registers:
                total_0, total_1, total_2, total_3, count = _sums_from_registers(
                    ring, scales, column_scales, count, scale_stride, group, depth, stages, layout
                )
                _store(out, total_0, start, row_count, column, out_stride, width)
                _store(out, total_1, start, row_count, column + 64, out_stride, width)
                _store(out, total_2, start, row_count, column + 128, out_stride, width)
                _store(out, total_3, start, row_count, column + 192, out_stride, width)
            else:
                left, right, count = _sums(
                    ring, scales, column_scales, count, scale_stride, group, depth, columns, stages, layout
                )
                _store(out, left, start, row_count, column, out_stride, width)
                if columns == 256:
                    _store(out, right, start, row_count, column + 128, out_stride, width)
        else:
            count = _drain(ring, count, depth, stages)


@gluon.jit(do_not_specialize=["row_count", "scale_stride"])
def tiles_kernel(
    rows, row_scales, weight, weight_scales, out, row_count, scale_stride, out_stride,
    depth: gl.constexpr, width: gl.constexpr, columns: gl.constexpr, from_registers: gl.constexpr,
    band: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """out[r, :] = x[r] @ weight.T.

    Args:
        rows: descriptor over x e4m3 [n, K], boxes [64, 128]; row_scales float32 [K / 128, n].
        weight: descriptor over e4m3 [N, K], boxes [64, 128] ``from_registers``, else [128, 128];
            weight_scales float32 [N / 128, K / 128]. N is a multiple of ``columns``.
        out: [n, N].
    """
    box_rows: gl.constexpr = 64 if from_registers else 128
    boxes: gl.constexpr = columns // box_rows
    tiles: gl.constexpr = (width + columns - 1) // columns
    row_blocks = (row_count + WIDE - 1) // WIDE
    row_stages = gl.allocate_shared_memory(gl.float8e4nv, [2 * stages, HALF, WIDE], rows.layout)
    weight_stages = gl.allocate_shared_memory(gl.float8e4nv, [boxes * stages, box_rows, WIDE], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    ring = (row_stages, weight_stages, full, empty)
    gl.warp_specialize(
        [
            (_multiply_tiles, (ring, row_scales, weight_scales, out, row_count, row_blocks, scale_stride,
                               out_stride, 0, depth, width, columns, from_registers, band, stages)),
            (_multiply_tiles, (ring, row_scales, weight_scales, out, row_count, row_blocks, scale_stride,
                               out_stride, 1, depth, width, columns, from_registers, band, stages)),
            (_feed, (rows, weight, ring, row_count, row_blocks, tiles, depth, columns, box_rows, band,
                     stages)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
