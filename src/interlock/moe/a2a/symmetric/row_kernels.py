"""Rows to their places in their experts' ranks, and results to their lanes in their tokens' ranks.

Rows are copied as 32-bit words, four side by side: every row is a multiple of 16 bytes. A row is read once
and written once for each of its lanes. Targets are int64: rank << 32 | row there, -1 for none.

Legend: n tokens, k lanes a token, T * k lanes that a rank may have, L experts of this rank.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from interlock.moe.a2a.symmetric.flags import RESULTS_STAGE, ROWS_STAGE, address_of, finish

WEIGHTS, ORIGINS, SCALES = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
ROWS, RESULTS = tl.constexpr(5), tl.constexpr(6)


@triton.jit
def _words(address):
    """A section as 32-bit words; every section and every row starts at a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _send_lists(
    weights, scales, targets, peers, rank, ranks, token, lanes_of_rank, scale_stride, groups,
    lanes: tl.constexpr, slots: tl.constexpr, group_block: tl.constexpr,
):  # fmt: skip
    """Weight, origin and scales of every lane of one token."""
    slot = tl.arange(0, slots)
    inside = slot < lanes
    target = tl.load(targets + token * lanes + slot, mask=inside, other=-1)
    live = target >= 0
    owner, place = tl.where(live, target >> 32, 0), target & 0xFFFFFFFF
    weight = tl.load(weights + token * lanes + slot, mask=live, other=0.0)
    to = address_of(peers, WEIGHTS, ranks, owner).to(tl.pointer_type(tl.float32))
    tl.store(to + place, weight, mask=live)
    to = address_of(peers, ORIGINS, ranks, owner).to(tl.pointer_type(tl.int32))
    tl.store(to + place, (rank * lanes_of_rank + token * lanes + slot).to(tl.int32), mask=live)
    if group_block > 0:
        group = tl.arange(0, group_block)
        scale = tl.load(scales + token * scale_stride + group, mask=group < groups, other=0.0)
        to = address_of(peers, SCALES, ranks, owner).to(tl.pointer_type(tl.float32))
        where = to[:, None] + place[:, None] * groups + group[None, :]
        both = live[:, None] & (group < groups)[None, :]
        tl.store(where, tl.broadcast_to(scale[None, :], [slots, group_block]), mask=both)


@triton.jit(do_not_specialize=[
    "rank", "ranks", "tokens", "lanes_of_rank", "row_quads", "quads", "scale_stride", "groups", "limit",
])  # fmt: skip
def send_rows_kernel(
    x, scales, weights, targets, peers, state, notice,
    rank, ranks, tokens, lanes_of_rank, row_quads, quads, scale_stride, groups, limit,
    lanes: tl.constexpr, slots: tl.constexpr, block: tl.constexpr, group_block: tl.constexpr,
    width: tl.constexpr, waits: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """x [n, h] to the places of its lanes; then tell every rank, and wait for all of theirs.

    Program (worker, block of words): workers walk over the tokens. ``quads``: 16-byte pieces of a row, and
    ``row_quads`` between the starts of rows of x. ``group_block`` 0: rows without scales.
    """
    words = quads * 4
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < words
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        values = tl.load(x + token * (row_quads * 4) + column, mask=inside, other=0)
        for lane in tl.static_range(lanes):
            target = tl.load(targets + token * lanes + lane)
            live = target >= 0
            to = _words(address_of(peers, ROWS, ranks, tl.where(live, target >> 32, 0)))
            to += (target & 0xFFFFFFFF) * words
            tl.store(to + column, values, mask=inside & live)
        if tl.program_id(1) == 0:
            _send_lists(
                weights, scales, targets, peers, rank, ranks, token, lanes_of_rank, scale_stride, groups,
                lanes, slots, group_block,
            )  # fmt: skip
    finish(peers, rank, ranks, ROWS_STAGE, state, notice, limit, width, waits, clocked)


@triton.jit(do_not_specialize=["rank", "ranks", "lanes_of_rank", "rows", "quads", "limit"])
def return_rows_kernel(
    results, counts, psum, peers, state, notice, rank, ranks, lanes_of_rank, rows, quads, limit,
    tile: tl.constexpr, block: tl.constexpr, width: tl.constexpr, waits: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """results [rows, h] to the lanes that their rows came from; then tell every rank, and wait for theirs.

    Program (expert, worker, block of words): workers walk over an expert's filled rows, ``tile`` at once.
    """
    words = quads * 4
    expert = tl.program_id(0)
    column = tl.program_id(2) * block + tl.arange(0, block)
    inside = column < words
    count = tl.load(counts + expert)
    start = tl.load(psum + expert) - count
    end = tl.minimum(start + count, rows)
    origins = address_of(peers, ORIGINS, ranks, rank).to(tl.pointer_type(tl.int32))
    for first in range(start + tl.program_id(1) * tile, end, tl.num_programs(1) * tile):
        row = first + tl.arange(0, tile)
        live = row < end
        both = live[:, None] & inside[None, :]
        origin = tl.load(origins + row, mask=live, other=0)
        home, lane = origin // lanes_of_rank, origin % lanes_of_rank
        read = results + row.to(tl.int64) * words
        values = tl.load(read[:, None] + column[None, :], mask=both, other=0)
        to = address_of(peers, RESULTS, ranks, home).to(tl.pointer_type(tl.int32))
        to = tl.multiple_of(to, 16) + lane.to(tl.int64) * words
        tl.store(to[:, None] + column[None, :], values, mask=both)
    finish(peers, rank, ranks, RESULTS_STAGE, state, notice, limit, width, waits, clocked)
