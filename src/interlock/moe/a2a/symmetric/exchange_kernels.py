"""Counts to all ranks, and from everybody's counts the place of every lane: its row in its expert's rank.

Rows of one expert are ordered by (source rank, token, lane), whoever comes first: a rank's first place in an
expert's rows follows the lanes of the ranks before it. Every rank computes all places from the same table.

Legend: R ranks, E experts, C chunks of lanes, M rows that an expert may have in a slab, A alignment.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from interlock.kernels.triton.route_lists import count_experts, rank_in_chunk, spread_starts
from interlock.moe.a2a.symmetric.flags import (
    BAD_ID,
    COUNTS_STAGE,
    EPOCH,
    FAILED,
    OVERFLOW,
    TOTAL,
    address_of,
    fail,
    signal,
    wait,
)

COUNTS = tl.constexpr(1)


@triton.jit
def _histogram(ids, state, notice, index, lanes, experts, chunk: tl.constexpr, bins: tl.constexpr):
    """int32 [bins] of one chunk; an id that no expert has is told, and counts as none."""
    lane = index * chunk + tl.arange(0, chunk)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1)
    wrong = (expert >= experts) | (expert < -1)
    if tl.sum(wrong.to(tl.int32), axis=0) > 0:
        first = tl.min(tl.where(wrong, lane, lanes), axis=0)
        fail(state, notice, BAD_ID, first, tl.load(ids + first))
    return tl.histogram(tl.where(wrong | (expert < 0), bins - 1, expert).to(tl.int32), bins)


@triton.jit(do_not_specialize=["lanes", "experts"])
def count_kernel(ids, histogram, state, notice, lanes, experts, chunk: tl.constexpr, bins: tl.constexpr):
    """histogram int32 [C, bins] of ids int64 [lanes]; the last bin is for lanes without an expert."""
    counts = _histogram(ids, state, notice, tl.program_id(0), lanes, experts, chunk, bins)
    tl.store(histogram + tl.program_id(0) * bins + tl.arange(0, bins), counts)


@triton.jit
def _announce(
    peers, rank, ranks, experts, counts, epoch, failed,
    bins: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """counts int32 [bins] into this rank's row of every peer's table."""
    order = tl.arange(0, bins)
    for first in range(0, ranks, tile):
        peer = first + tl.arange(0, tile)
        there = peer < ranks
        table = address_of(peers, COUNTS, ranks, tl.where(there, peer, 0)).to(tl.pointer_type(tl.int32))
        live = there[:, None] & ((order < experts) & (failed == 0))[None, :]
        where = table[:, None] + rank * experts + order[None, :]
        tl.store(where, tl.broadcast_to(counts[None, :], [tile, bins]), mask=live)
    signal(peers, rank, ranks, COUNTS_STAGE, epoch, failed, width)


@triton.jit
def _first_places(
    peers, first_beside, counts, psum, notice, rank, ranks, first_expert, local_experts, experts, slab_rows,
    alignment, failed, bins: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """int32 [bins]: where this rank's first lane of each expert goes. Writes what this rank will receive."""
    order = tl.arange(0, bins)
    table = address_of(peers, COUNTS, ranks, rank).to(tl.pointer_type(tl.int32))
    beside = tl.load(first_beside + order, mask=order < experts, other=0)
    total = tl.zeros([bins], tl.int32)
    before = tl.zeros([bins], tl.int32)
    for first in range(0, ranks, tile):
        peer = first + tl.arange(0, tile)
        live = (peer < ranks)[:, None] & ((order < experts) & (failed == 0))[None, :]
        where = table + peer[:, None] * experts + order[None, :]
        theirs = tl.load(where, mask=live, other=0, cache_modifier=".cg")
        total += tl.sum(theirs, axis=0)
        before += tl.sum(tl.where((peer < rank)[:, None], theirs, 0), axis=0)
    size = (total + alignment - 1) // alignment * alignment
    if slab_rows > 0:
        start = (order - beside) * slab_rows
    else:
        start = tl.cumsum(size, axis=0) - size
        start -= tl.gather(start, beside, 0)
    here = order - first_expert
    mine = (here >= 0) & (here < local_experts)
    tl.store(counts + here, total, mask=mine)
    tl.store(psum + here, start + total, mask=mine)
    tl.store(notice + TOTAL, tl.sum(tl.where(mine, size, 0), axis=0).to(tl.int64))
    return start + before


@triton.jit
def _target_chunk(
    histogram, owners, targets, state, notice, index, lane, expert, before, lanes, experts, rows, failed,
    bins: tl.constexpr,
):  # fmt: skip
    """targets int64: owner << 32 | row there, or -1. ``before``: lanes of the chunk that come first."""
    live = (expert >= 0) & (expert < experts) & (failed == 0)
    place = tl.load(histogram + index * bins + expert, mask=live, other=0) + before
    beyond = live & (place >= rows)
    if tl.sum(beyond.to(tl.int32), axis=0) > 0:
        fail(state, notice, OVERFLOW, tl.max(tl.where(beyond, place, 0), axis=0), tl.max(place, axis=0))
    owner = tl.load(owners + expert, mask=live, other=0)
    target = (owner.to(tl.int64) << 32) | place.to(tl.int64)
    tl.store(targets + lane, tl.where(live & (place < rows), target, -1), mask=lane < lanes)


@triton.jit(do_not_specialize=["lanes", "experts", "rows"])
def target_kernel(
    ids, histogram, owners, targets, state, notice, lanes, experts, rows,
    chunk: tl.constexpr, bins: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Targets of the lanes of one chunk each, from its first places."""
    index = tl.program_id(0)
    lane = index * chunk + tl.arange(0, chunk)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
    before = rank_in_chunk(ids, expert, index * chunk, lanes, chunk, tile)
    failed = tl.load(state + FAILED)
    _target_chunk(
        histogram, owners, targets, state, notice, index, lane, expert, before, lanes, experts, rows, failed,
        bins,
    )  # fmt: skip


@triton.jit(do_not_specialize=[
    "rank", "ranks", "first_expert", "local_experts", "experts", "lanes", "chunks", "rows", "slab_rows",
    "alignment", "limit",
])  # fmt: skip
def exchange_kernel(
    ids, histogram, targets, counts, psum, peers, first_beside, owners, state, notice,
    rank, ranks, first_expert, local_experts, experts, lanes, chunks, rows, slab_rows, alignment, limit,
    few: tl.constexpr, sends: tl.constexpr, waits: tl.constexpr, clocked: tl.constexpr,
    chunk: tl.constexpr, bins: tl.constexpr, tile: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program: begin a step, send the counts, wait for all ranks', and find the first places.

    Args:
        histogram: int32 [C, bins]; becomes the first places of each chunk.
        counts, psum: int32 [L] of this rank's experts, written; ``notice`` gets the rows that they take up.
        first_beside: int32 [E], the first expert of the rank that holds an expert.
        rows: rows that a rank's memory holds.
        slab_rows: M, or 0 for segments aligned to ``alignment``.
        few: all lanes are one chunk, which is counted and placed here too.
        sends, waits: the halves, for a test that runs all ranks in one thread.
    """
    epoch = tl.load(state + EPOCH)
    order = tl.arange(0, bins)
    if sends:
        epoch += 1
        if few:
            mine = _histogram(ids, state, notice, 0, lanes, experts, chunk, bins)
            mine = tl.where(order < experts, mine, 0)
        else:
            mine = count_experts(histogram, chunks, experts, bins, tile)
        tl.debug_barrier()
        _announce(
            peers, rank, ranks, experts, mine, epoch, tl.load(state + FAILED), bins, tile, width
        )  # fmt: skip
        tl.store(state + EPOCH, epoch)
    if waits:
        if few:
            lane = tl.arange(0, chunk)
            expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
            before = rank_in_chunk(ids, expert, 0, lanes, chunk, 16)
        failed = wait(
            peers, rank, ranks, COUNTS_STAGE, epoch, state, notice, limit, tl.load(state + FAILED), width,
            clocked,
        )  # fmt: skip
        starts = _first_places(
            peers, first_beside, counts, psum, notice, rank, ranks, first_expert, local_experts, experts,
            slab_rows, alignment, failed, bins, tile,
        )  # fmt: skip
        if few:
            tl.store(histogram + order, starts)
            tl.debug_barrier()
            _target_chunk(
                histogram, owners, targets, state, notice, 0, lane, expert, before, lanes, experts, rows,
                failed, bins,
            )  # fmt: skip
        else:
            spread_starts(histogram, starts, chunks, bins, tile)
