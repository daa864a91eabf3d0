"""Rows to the places of their experts and back, on the device. References: ``placement``.

Kernels that walk over rows take *entries*: equal stretches of rows of which the first ``live[entry]`` are
filled (blocks of aligned segments, or the slabs of a masked layout). A few programs walk over each entry, so
that empty rows cost nothing.

Legend: R lanes or rows, C chunks of lanes, E local experts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from interlock.kernels.triton.quantise import to_fp8
from interlock.kernels.triton.route_lists import count_experts, rank_by_counts, rank_in_part, spread_starts


@triton.jit
def store_live(live, count, leader, blocks, alignment: tl.constexpr):
    """How many rows of each block are filled: every expert's blocks begin at its leader, without gaps."""
    size = (count + alignment - 1) // alignment
    for j in range(tl.max(size, axis=0)):
        filled = tl.minimum(count - j * alignment, alignment)
        tl.store(live + leader + j, filled, mask=j < size)
    total = tl.sum(size, axis=0)
    for start in range(0, blocks, 1024):
        index = start + tl.arange(0, 1024)
        tl.store(live + index, 0, mask=(index >= total) & (index < blocks))


@triton.jit(do_not_specialize=["experts", "blocks"])
def segment_live_kernel(counts, psum, live, experts, blocks, bins: tl.constexpr, alignment: tl.constexpr):
    """One program: ``live`` of segments that are there already."""
    order = tl.arange(0, bins)
    count = tl.load(counts + order, mask=order < experts, other=0)
    start = tl.load(psum + order, mask=order < experts, other=0) - count
    store_live(live, count, start // alignment, blocks, alignment)


@triton.jit(do_not_specialize=["chunks", "experts", "blocks"])
def aligned_scan_kernel(
    histogram, counts, psum, live, chunks, experts, blocks,
    bins: tl.constexpr, tile: tl.constexpr, alignment: tl.constexpr,
):  # fmt: skip
    """One program: counts, ends and filled blocks of aligned segments; histogram becomes first places."""
    order = tl.arange(0, bins)
    count = count_experts(histogram, chunks, experts, bins, tile)
    size = (count + alignment - 1) // alignment
    leader = tl.cumsum(size, axis=0) - size
    starts = leader * alignment
    tl.store(counts + order, count, mask=order < experts)
    tl.store(psum + order, starts + count, mask=order < experts)
    store_live(live, count, leader, blocks, alignment)
    spread_starts(histogram, starts, chunks, bins, tile)


@triton.jit(do_not_specialize=["lanes"])
def place_of_lane_kernel(
    ids, histogram, places, lanes,
    chunk: tl.constexpr, part: tl.constexpr, bins: tl.constexpr, tile: tl.constexpr, counts: tl.constexpr,
):  # fmt: skip
    """places int32 [lanes]: the chunk's first place of the lane's expert plus the rank within the chunk.

    Program (chunk, part of the chunk). counts: ranks by ``rank_by_counts``.
    """
    first = tl.program_id(0) * chunk
    offset = tl.program_id(1) * part
    lane = first + offset + tl.arange(0, part)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
    if counts:
        rank = rank_by_counts(ids, expert, first, offset, lanes, chunk, part, bins, tile)
    else:
        rank = rank_in_part(ids, expert, first, offset, lanes, part, tile)
    live = expert >= 0
    place = tl.load(histogram + tl.program_id(0) * bins + expert, mask=live, other=0) + rank
    tl.store(places + lane, tl.where(live, place, -1), mask=lane < lanes)


@triton.jit(do_not_specialize=["out_scale_stride"])
def scatter_rows_kernel(
    x, x_scales, places, out, out_scales, row_stride, scale_row_stride, scale_stride, out_scale_stride,
    lanes: tl.constexpr, width: tl.constexpr, block: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """out[place] = x[token], out_scales[:, place] = x_scales[token] for each lane that has a place."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    values = tl.load(x + token * row_stride + column, mask=column < width, other=0)
    group = tl.program_id(1) * (block // 128) + tl.arange(0, groups)
    mine = (tl.arange(0, groups) < block // 128) & (group * 128 < width)
    scale = tl.load(x_scales + token * scale_row_stride + group.to(tl.int64) * scale_stride, mask=mine)
    for lane in tl.static_range(lanes):
        place = tl.load(places + token * lanes + lane)
        held = place >= 0
        tl.store(out + place.to(tl.int64) * width + column, values, mask=(column < width) & held)
        tl.store(out_scales + group.to(tl.int64) * out_scale_stride + place, scale, mask=mine & held)


@triton.jit
def gather_kernel(
    rows, places, weights, out, hidden,
    lanes: tl.constexpr, block: tl.constexpr, has_weights: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over lanes in ascending order of weight * rows[place] in float32; rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], tl.float32)
    for lane in tl.static_range(lanes):
        place = tl.load(places + token * lanes + lane)
        live = inside & (place >= 0)
        part = tl.load(rows + place.to(tl.int64) * hidden + column, mask=live, other=0.0).to(tl.float32)
        if has_weights:
            part *= tl.load(weights + token * lanes + lane, mask=place >= 0, other=0.0)
        total += part
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather_lanes_kernel(
    rows, places, weights, out, hidden,
    lanes: tl.constexpr, block: tl.constexpr, has_weights: tl.constexpr,
):  # fmt: skip
    """out[token, lane] = weight * rows[place]; lanes without a place are not written."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    for lane in tl.static_range(lanes):
        place = tl.load(places + token * lanes + lane)
        live = (column < hidden) & (place >= 0)
        part = tl.load(rows + place.to(tl.int64) * hidden + column, mask=live, other=0.0).to(tl.float32)
        if has_weights:
            part *= tl.load(weights + token * lanes + lane, mask=place >= 0, other=0.0)
        where = out + (token * lanes + lane) * hidden + column
        tl.store(where, part.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["entry_rows"])
def silu_quantise_rows_kernel(
    gate_up, live, weights, act, act_scales, entry_rows, scale_entry_stride, scale_stride,
    inter: tl.constexpr, groups: tl.constexpr, has_weights: tl.constexpr,
):  # fmt: skip
    """act[r], act_scales of r = quantised silu(gate) * up of every filled row r; weights go into the scales.

    Program (entry, worker, groups of 128 channels). The scale of row j of an entry and group c lies at
    entry * scale_entry_stride + c * scale_stride + j.
    """
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(2) * groups + tl.arange(0, groups)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < inter
    filled = tl.load(live + entry)
    for j in range(tl.program_id(1), filled, tl.num_programs(1)):
        row = entry * entry_rows + j
        where = gate_up + row * (2 * inter) + column
        gate = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(where + inter, mask=inside, other=0.0).to(tl.float32)
        values, scale = to_fp8(gate / (1.0 + tl.exp(-gate)) * up, 1)
        tl.store(act + row * inter + column, values, mask=inside)
        if has_weights:
            scale *= tl.load(weights + row)
        at = act_scales + entry * scale_entry_stride + group.to(tl.int64) * scale_stride + j
        tl.store(at, scale, mask=group * 128 < inter)


@triton.jit(do_not_specialize=["entry_rows", "out_entry_rows"])
def quantise_entries_kernel(
    x, live, out, scales, entry_rows, out_entry_rows, scale_entry_stride, scale_stride,
    width: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """out, scales = quantised x of every filled row; places of scales as in the kernel above.

    Row j of an entry is row entry * entry_rows + j of x and entry * out_entry_rows + j of out.
    """
    entry = tl.program_id(0).to(tl.int64)
    group = tl.program_id(2) * groups + tl.arange(0, groups)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    filled = tl.load(live + entry)
    for j in range(tl.program_id(1), filled, tl.num_programs(1)):
        read = x + (entry * entry_rows + j) * width + column
        values, scale = to_fp8(tl.load(read, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(out + (entry * out_entry_rows + j) * width + column, values, mask=inside)
        at = scales + entry * scale_entry_stride + group.to(tl.int64) * scale_stride + j
        tl.store(at, scale, mask=group * 128 < width)


@triton.jit(do_not_specialize=["slab_rows"])
def move_rows_kernel(
    source, target, counts, psum, slab_rows,
    source_expert_stride, source_row_stride, source_stride,
    target_expert_stride, target_row_stride, target_stride,
    width: tl.constexpr, block: tl.constexpr, to_slab: tl.constexpr,
):  # fmt: skip
    """Rows of aligned segments to a slab, or back (``to_slab``); any strides, so scales move with it too.

    Program (expert, worker, block of channels). Rows beyond ``slab_rows`` have no room and are left out.
    """
    expert = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(2) * block + tl.arange(0, block)).to(tl.int64)
    inside = column < width
    count = tl.load(counts + expert)
    start = (tl.load(psum + expert) - count).to(tl.int64)
    for j in range(tl.program_id(1), tl.minimum(count, slab_rows), tl.num_programs(1)):
        if to_slab:
            come_from, go_to = start + j, expert * 0 + j
        else:
            come_from, go_to = expert * 0 + j, start + j
        read = source + expert * source_expert_stride + come_from * source_row_stride
        write = target + expert * target_expert_stride + go_to * target_row_stride
        values = tl.load(read + column * source_stride, mask=inside, other=0)
        tl.store(write + column * target_stride, values, mask=inside)
