"""Which rows each expert computes, built on the device without a host synchronisation.

Every array has a static size (an upper bound), so a captured CUDA graph replays with any routing. Lists are
stable: within an expert, rows keep the order of their lanes. Reference: ``row_blocks.reference_lists``.

``block_count`` int32 [2]: number of blocks in use, and one past the last place in use.
``blocks`` int32 [5, B]: expert, first place, one past the last place, first block of the same expert, number
of blocks of the same expert.

Legend: R lanes (tokens * k), C chunks of lanes, E local experts, B row blocks of ``block_rows`` rows each.
Ids are local expert ids; -1 lanes get no place.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from interlock.kernels.triton.quantise import quantise_part


@triton.jit
def _few_lanes(
    ids, weights, source, target, weight, blocks, block_count, lanes, k, max_blocks,
    has_weights: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, width)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
    row, column = lane[:, None], lane[None, :]
    across = tl.load(ids + column, mask=column < lanes, other=-1).to(tl.int32)
    same = expert[:, None] == across
    rank = tl.sum((same & (column < row)).to(tl.int32), axis=1)
    rank_across = tl.sum((same & (row < column)).to(tl.int32), axis=0)
    smaller = (across < expert[:, None]) & (across >= 0)
    place = tl.sum(smaller.to(tl.int32), axis=1) + rank
    block = tl.sum((smaller & (rank_across[None, :] == 0)).to(tl.int32), axis=1)
    count = tl.sum(same.to(tl.int32), axis=1)
    live = expert >= 0
    leads = live & (rank == 0)
    tl.store(target + place, lane, mask=live)
    tl.store(source + place, lane // k, mask=live)
    if has_weights:
        tl.store(weight + place, tl.load(weights + lane, mask=live, other=0.0), mask=live)
    tl.store(blocks + block, expert, mask=leads)
    tl.store(blocks + max_blocks + block, place, mask=leads)
    tl.store(blocks + 2 * max_blocks + block, place + count, mask=leads)
    tl.store(blocks + 3 * max_blocks + block, block, mask=leads)
    tl.store(blocks + 4 * max_blocks + block, 1, mask=leads)
    total = tl.sum(leads.to(tl.int32), axis=0)
    tl.store(block_count, total)
    tl.store(block_count + 1, tl.sum(live.to(tl.int32), axis=0))
    tl.store(blocks + total + lane, -1, mask=total + lane < max_blocks)


@triton.jit(do_not_specialize=["lanes", "max_blocks"])
def few_lanes_kernel(
    ids, weights, source, target, weight, blocks, block_count, lanes, k, max_blocks,
    has_weights: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The whole job in one program, for at most ``width`` lanes and one block an expert."""
    _few_lanes(
        ids, weights, source, target, weight, blocks, block_count, lanes, k, max_blocks, has_weights, width
    )


@triton.jit(do_not_specialize=["lanes", "max_blocks", "scale_stride"])
def few_lanes_quantise_kernel(
    ids, weights, source, target, weight, blocks, block_count, lanes, k, max_blocks,
    x, out, scales, row_stride, scale_stride,
    has_weights: tl.constexpr, width: tl.constexpr, depth: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """``few_lanes_kernel`` in the first program, ``quantise.quantise_kernel`` in the others."""
    if tl.program_id(0) == 0:
        _few_lanes(
            ids,
            weights,
            source,
            target,
            weight,
            blocks,
            block_count,
            lanes,
            k,
            max_blocks,
            has_weights,
            width,
        )
    else:
        _quantise_one(x, out, scales, tl.program_id(0) - 1, row_stride, depth, groups, scale_stride)


@triton.jit
def _quantise_one(x, out, scales, index, row_stride, depth: tl.constexpr, groups: tl.constexpr, scale_stride):
    parts: tl.constexpr = (depth + groups * 128 - 1) // (groups * 128)
    row = (index // parts).to(tl.int64)
    quantise_part(x, out, scales, row, index % parts, row_stride, depth, groups, scale_stride)


@triton.jit
def _histogram(ids, histogram, index, lanes, chunk: tl.constexpr, bins: tl.constexpr):
    lane = index * chunk + tl.arange(0, chunk)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
    counts = tl.histogram(tl.where(expert < 0, bins - 1, expert), bins)
    tl.store(histogram + index * bins + tl.arange(0, bins), counts)


@triton.jit(do_not_specialize=["lanes"])
def histogram_kernel(ids, histogram, lanes, chunk: tl.constexpr, bins: tl.constexpr):
    """histogram int32 [C, bins]: how many lanes of each chunk go to each expert."""
    _histogram(ids, histogram, tl.program_id(0), lanes, chunk, bins)


@triton.jit(do_not_specialize=["lanes", "chunks", "scale_stride"])
def histogram_quantise_kernel(
    ids, histogram, lanes, chunks, x, out, scales, row_stride, scale_stride,
    chunk: tl.constexpr, bins: tl.constexpr, depth: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """``histogram_kernel`` in the first ``chunks`` programs, ``quantise.quantise_kernel`` in the others."""
    if tl.program_id(0) < chunks:
        _histogram(ids, histogram, tl.program_id(0), lanes, chunk, bins)
    else:
        _quantise_one(x, out, scales, tl.program_id(0) - chunks, row_stride, depth, groups, scale_stride)


@triton.jit
def count_experts(histogram, chunks, experts, bins: tl.constexpr, tile: tl.constexpr):
    """int32 [bins]: lanes of each expert over all chunks; 0 beyond the experts."""
    order = tl.arange(0, bins)
    counts = tl.zeros([bins], tl.int32)
    for start in range(0, chunks, tile):
        chunk = start + tl.arange(0, tile)
        where = histogram + chunk[:, None] * bins + order[None, :]
        counts += tl.sum(tl.load(where, mask=chunk[:, None] < chunks, other=0), axis=0)
    return tl.where(order < experts, counts, 0)


@triton.jit
def spread_starts(histogram, starts, chunks, bins: tl.constexpr, tile: tl.constexpr):
    """histogram becomes the place of each chunk's first lane of each expert, from where each list starts."""
    order = tl.arange(0, bins)
    place = starts
    for start in range(0, chunks, tile):
        chunk = start + tl.arange(0, tile)
        where = histogram + chunk[:, None] * bins + order[None, :]
        part = tl.load(where, mask=chunk[:, None] < chunks, other=0)
        tl.store(where, place[None, :] + tl.cumsum(part, axis=0) - part, mask=chunk[:, None] < chunks)
        place += tl.sum(part, axis=0)


@triton.jit
def rank_in_chunk(ids, expert, first, lanes, chunk: tl.constexpr, tile: tl.constexpr):
    """int32 [chunk]: how many lanes of the chunk from ``first`` on name the same expert and come before."""
    return rank_in_part(ids, expert, first, 0, lanes, chunk, tile)


@triton.jit
def rank_in_part(ids, expert, first, offset, lanes, part: tl.constexpr, tile: tl.constexpr):
    """int32 [part]: ``rank_in_chunk`` of the chunk's lanes ``offset : offset + part``, which ``expert``
    names."""
    inside = offset + tl.arange(0, part)
    before = tl.zeros([part, tile], tl.int32)
    for start in range(0, offset + part, tile):
        column = start + tl.arange(0, tile)
        across = tl.load(ids + first + column, mask=first + column < lanes, other=-1).to(tl.int32)
        same = (expert[:, None] == across[None, :]) & (column[None, :] < inside[:, None])
        before += same.to(tl.int32)
    return tl.sum(before, axis=1)


@triton.jit
def rank_by_counts(
    ids, expert, first, offset, lanes,
    chunk: tl.constexpr, part: tl.constexpr, bins: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """As ``rank_in_part``: lanes of the chunk before the part are counted, only the part's own compared."""
    inside = tl.arange(0, chunk)
    there = (inside < offset) & (first + inside < lanes)
    earlier = tl.load(ids + first + inside, mask=there, other=-1).to(tl.int32)
    before = tl.histogram(tl.where(earlier < 0, bins - 1, earlier), bins)
    own = rank_in_part(ids, expert, first + offset, 0, lanes, part, tile)
    return tl.gather(before, tl.where(expert < 0, bins - 1, expert), axis=0) + own


@triton.jit
def store_blocks(counts, starts, order, blocks, block_count, max_blocks, block_rows: tl.constexpr):
    """Cut every expert's list into blocks; entries behind the last block get expert -1."""
    size = (counts + block_rows - 1) // block_rows
    leader = tl.cumsum(size, axis=0) - size
    total = tl.sum(size, axis=0)
    tl.store(block_count, total)
    tl.store(block_count + 1, tl.max(tl.where(counts > 0, starts + counts, 0), axis=0))
    for j in range(tl.max(size, axis=0)):
        live = j < size
        first = starts + j * block_rows
        entry = blocks + leader + j
        tl.store(entry, order, mask=live)
        tl.store(entry + max_blocks, first, mask=live)
        tl.store(entry + 2 * max_blocks, tl.minimum(first + block_rows, starts + counts), mask=live)
        tl.store(entry + 3 * max_blocks, leader, mask=live)
        tl.store(entry + 4 * max_blocks, size, mask=live)
    for start in range(0, max_blocks, 1024):
        index = start + tl.arange(0, 1024)
        tl.store(blocks + index, -1, mask=(index >= total) & (index < max_blocks))


@triton.jit(do_not_specialize=["chunks", "experts", "max_blocks"])
def scan_kernel(
    histogram, blocks, block_count, chunks, experts, max_blocks,
    bins: tl.constexpr, tile: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """One program: histogram becomes the place of each chunk's first lane of each expert; blocks are cut."""
    order = tl.arange(0, bins)
    counts = count_experts(histogram, chunks, experts, bins, tile)
    starts = tl.cumsum(counts, axis=0) - counts
    store_blocks(counts, starts, order, blocks, block_count, max_blocks, block_rows)
    spread_starts(histogram, starts, chunks, bins, tile)


@triton.jit(do_not_specialize=["lanes"])
def place_kernel(
    ids, weights, histogram, source, target, weight, places, lanes, k,
    has_weights: tl.constexpr, chunk: tl.constexpr, part: tl.constexpr, bins: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Write each lane at its place: its chunk's first place plus its rank within the chunk.

    Program (chunk, part of the chunk).
    """
    first = tl.program_id(0) * chunk
    offset = tl.program_id(1) * part
    lane = first + offset + tl.arange(0, part)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
    rank = rank_in_part(ids, expert, first, offset, lanes, part, tile)
    live = expert >= 0
    place = tl.load(histogram + tl.program_id(0) * bins + expert, mask=live, other=0) + rank
    tl.store(places + lane, tl.where(live, place, -1), mask=lane < lanes)
    tl.store(target + place, lane, mask=live)
    tl.store(source + place, lane // k, mask=live)
    if has_weights:
        tl.store(weight + place, tl.load(weights + lane, mask=live, other=0.0), mask=live)


@triton.jit(do_not_specialize=["experts", "slab_rows", "max_blocks"])
def segment_blocks_kernel(
    counts, psum, blocks, block_count, experts, slab_rows, max_blocks,
    has_psum: tl.constexpr, bins: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    """One program: blocks of rows that are grouped already (``psum`` of the contiguous layout, or a slab)."""
    order = tl.arange(0, bins)
    mine = order < experts
    count = tl.load(counts + order, mask=mine, other=0)
    if has_psum:
        starts = tl.load(psum + order, mask=mine, other=0) - count
    else:
        starts = order * slab_rows
    store_blocks(count, starts, order, blocks, block_count, max_blocks, block_rows)
