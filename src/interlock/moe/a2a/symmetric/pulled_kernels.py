"""Dispatch and combine of few tokens, one launch each: every rank publishes, and takes what it needs.

Dispatch: a rank writes the routes of its tokens to every rank and their rows into its own region, once, and
raises flags. From everybody's routes a rank knows which rows its experts get, in which order, and reads them
from where they were published. Combine: the rank of a token reads the results of its lanes where the experts'
ranks left them, adds them in lane order in float32 and rounds once.

All programs of these launches wait for the flags, so their number is bounded. Where ranks share a GPU they
are cut in halves with a launch of one program between, which waits for all: see ``pulled.waiting_programs``.

Legend: R ranks, k lanes a token, T capacity, L experts of this rank, M rows of an expert's slab, P programs
that publish. A lane is numbered ``source rank * T * k + token * k + slot``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from interlock.moe.a2a.symmetric.flags import (
    BAD_ID,
    EPOCH,
    FAILED,
    FLAG_WORDS,
    FLAGS,
    OVERFLOW,
    RESULTS_STAGE,
    address_of,
    fail,
    meet,
    signal,
    wait_for,
)
from interlock.moe.a2a.symmetric.row_kernels import ROWS, SCALES, WEIGHTS

PUBLISHED, ROUTES, ROUTE_WEIGHTS = tl.constexpr(7), tl.constexpr(8), tl.constexpr(9)
TOKENS, TOKEN_SCALES = tl.constexpr(10), tl.constexpr(11)
PLACES, RESULT_SLAB = tl.constexpr(12), tl.constexpr(13)
TICKETS = tl.constexpr(4)
"""Word of the state: programs of the dispatch that have read its epoch."""
LATE_ROUTES = tl.constexpr(6)
"""Code of a notice: a peer that did not publish."""
STAMPED_STEPS = tl.constexpr(64)


@triton.jit
def _section(peers, section: tl.constexpr, ranks, rank, kind: tl.constexpr):
    """A section of a rank's region; every section and every row starts at a multiple of 16 bytes."""
    return tl.multiple_of(address_of(peers, section, ranks, rank).to(tl.pointer_type(kind)), 16)


@triton.jit
def _stamp(stamps, epoch, program, programs, end: tl.constexpr, stamped: tl.constexpr):
    """stamps int64 [STAMPED_STEPS, programs, 2]: the device's clock, ns, when a program began and ended."""
    if stamped:
        if end:
            tl.debug_barrier()
        step = (epoch % STAMPED_STEPS).to(tl.int64)
        tl.store(stamps + (step * programs + program) * 2 + end, globaltimer())


@triton.jit
def _publish_routes(
    expert, weight, token, peers, rank, ranks,
    slots: tl.constexpr, lanes: tl.constexpr, tile: tl.constexpr, span: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """expert, weight [tile * slots] of some tokens to every rank; tokens beyond the last have no experts."""
    slot = tl.arange(0, tile * slots) % slots
    lane = token * lanes + slot
    peer = tl.arange(0, width)
    there = peer < ranks
    both = there[:, None] & ((slot < lanes) & (lane < span))[None, :]
    where = rank * span + lane
    to = address_of(peers, ROUTES, ranks, tl.where(there, peer, 0)).to(tl.pointer_type(tl.int32))
    values = tl.broadcast_to(expert.to(tl.int32)[None, :], [width, tile * slots])
    tl.store(to[:, None] + where[None, :], values, mask=both)
    to = address_of(peers, ROUTE_WEIGHTS, ranks, tl.where(there, peer, 0)).to(tl.pointer_type(tl.float32))
    tl.store(to[:, None] + where[None, :], tl.broadcast_to(weight[None, :], [width, tile * slots]), mask=both)


@triton.jit
def _publish(
    x, scales, ids, weights, peers, state, notice, program, rank, ranks, tokens, experts, row_quads, quads,
    scale_stride, groups, epoch, failed,
    lanes: tl.constexpr, slots: tl.constexpr, span: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    group_block: tl.constexpr, width: tl.constexpr, publishers: tl.constexpr,
):  # fmt: skip
    """The share of one program: rows and scales into this rank's region, routes to all; then its flags."""
    words = quads * 4
    own = _section(peers, TOKENS, ranks, rank, tl.int32)
    own_scales = _section(peers, TOKEN_SCALES, ranks, rank, tl.float32)
    index = tl.arange(0, tile * slots)
    for first in range(program * tile, (span // lanes) * (1 - failed), publishers * tile):
        named = first + index // slots
        lane = named * lanes + index % slots
        live = (named < tokens) & (index % slots < lanes)
        expert = tl.load(ids + lane, mask=live, other=-1)
        weight = tl.load(weights + lane, mask=live, other=0.0)
        token = (first + tl.arange(0, tile)).to(tl.int64)
        inside = token < tokens
        for begin in range(0, words, block):
            column = begin + tl.arange(0, block)
            both = inside[:, None] & (column < words)[None, :]
            read = x + token[:, None] * (row_quads * 4) + column[None, :]
            values = tl.load(read, mask=both, other=0)
            tl.store(own + token[:, None] * words + column[None, :], values, mask=both)
        if group_block > 0:
            group = tl.arange(0, group_block)
            both = inside[:, None] & (group < groups)[None, :]
            values = tl.load(scales + token[:, None] * scale_stride + group[None, :], mask=both, other=0.0)
            tl.store(own_scales + token[:, None] * groups + group[None, :], values, mask=both)
        _publish_routes(expert, weight, named, peers, rank, ranks, slots, lanes, tile, span, width)
        wrong = (expert >= experts) | (expert < -1)
        if tl.sum(wrong.to(tl.int32), axis=0) > 0:
            worst = tl.min(tl.where(wrong, lane, span), axis=0)
            fail(state, notice, BAD_ID, worst, tl.load(ids + worst))
            failed = failed * 0 + 1
    tl.debug_barrier()
    peer = tl.arange(0, width)
    there = peer < ranks
    to = address_of(peers, PUBLISHED, ranks, tl.where(there, peer, 0)).to(tl.pointer_type(tl.int32))
    flags = tl.zeros([width], tl.int32) + epoch
    where = to + rank * publishers + program
    tl.atomic_xchg(where, flags, mask=there & (failed == 0), sem="release", scope="sys")


@triton.jit
def _await_routes(
    peers, rank, ranks, epoch, state, notice, limit, failed,
    publishers: tl.constexpr, width: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """Return when every program of every rank has published: 0, or 1 if one did not in time."""
    word = tl.arange(0, width * publishers)
    mine = word < ranks * publishers
    flags = address_of(peers, PUBLISHED, ranks, rank).to(tl.pointer_type(tl.int32))
    return wait_for(
        flags + tl.where(mine, word, 0), word // publishers, mine, LATE_ROUTES, epoch, state, notice, limit,
        failed, width, clocked,
    )  # fmt: skip


@triton.jit
def _list_rows(
    peers, rows, state, notice, rank, ranks, expert, slab_rows,
    span: tl.constexpr, scan: tl.constexpr,
):  # fmt: skip
    """rows int32 [M]: the lanes of ``expert`` in order. Returns how many."""
    routes = _section(peers, ROUTES, ranks, rank, tl.int32)
    total = tl.zeros([], tl.int32)
    for begin in range(0, ranks * span, scan):
        lane = begin + tl.arange(0, scan)
        hit = tl.load(routes + lane, mask=lane < ranks * span, other=-1, cache_modifier=".cg") == expert
        one = hit.to(tl.int32)
        place = total + tl.cumsum(one, axis=0) - one
        tl.store(rows + place, lane, mask=hit & (place < slab_rows))
        total += tl.sum(one, axis=0)
    if total > slab_rows:
        fail(state, notice, OVERFLOW, expert, total)
    tl.debug_barrier()
    return tl.minimum(total, slab_rows)


@triton.jit
def _take_rows(
    peers, rows, local, count, rank, ranks, slab_rows, quads, groups,
    lanes: tl.constexpr, span: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
    group_block: tl.constexpr,
):  # fmt: skip
    """Rows of one expert from where they were published, with weights and scales; their places go home."""
    words = quads * 4
    slab = _section(peers, ROWS, ranks, rank, tl.int32)
    slab_scales = _section(peers, SCALES, ranks, rank, tl.float32)
    slab_weights = address_of(peers, WEIGHTS, ranks, rank).to(tl.pointer_type(tl.float32))
    weights = address_of(peers, ROUTE_WEIGHTS, ranks, rank).to(tl.pointer_type(tl.float32))
    for first in range(tl.program_id(1) * tile, count, tl.num_programs(1) * tile):
        row = first + tl.arange(0, tile)
        live = row < count
        lane = tl.load(rows + row, mask=live, other=0)
        source = lane // span
        token = ((lane - source * span) // lanes).to(tl.int64)
        here = (local * slab_rows + row).to(tl.int64)
        read = _section(peers, TOKENS, ranks, source, tl.int32)
        for begin in range(0, words, block):
            column = begin + tl.arange(0, block)
            both = live[:, None] & (column < words)[None, :]
            where = read[:, None] + (token * words)[:, None] + column[None, :]
            values = tl.load(where, mask=both, other=0, cache_modifier=".cg")
            tl.store(slab + here[:, None] * words + column[None, :], values, mask=both)
        if group_block > 0:
            group = tl.arange(0, group_block)
            both = live[:, None] & (group < groups)[None, :]
            from_scales = _section(peers, TOKEN_SCALES, ranks, source, tl.float32)
            where = from_scales[:, None] + (token * groups)[:, None] + group[None, :]
            values = tl.load(where, mask=both, other=0.0, cache_modifier=".cg")
            tl.store(slab_scales + here[:, None] * groups + group[None, :], values, mask=both)
        weight = tl.load(weights + lane, mask=live, other=0.0, cache_modifier=".cg")
        tl.store(slab_weights + here, weight, mask=live)
        home = address_of(peers, PLACES, ranks, source).to(tl.pointer_type(tl.int32))
        tl.store(home + (lane - source * span), here.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=[
    "rank", "ranks", "tokens", "first_expert", "local_experts", "experts", "slab_rows", "row_quads", "quads",
    "scale_stride", "groups", "limit",
])  # fmt: skip
def dispatch_kernel(
    x, scales, ids, weights, counts, psum, lists, peers, state, notice, stamps,
    rank, ranks, tokens, first_expert, local_experts, experts, slab_rows, row_quads, quads, scale_stride,
    groups, limit,
    lanes: tl.constexpr, slots: tl.constexpr, span: tl.constexpr, publishers: tl.constexpr,
    scan: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, group_block: tl.constexpr,
    width: tl.constexpr, publishes: tl.constexpr, takes: tl.constexpr, clocked: tl.constexpr,
    stamped: tl.constexpr,
):  # fmt: skip
    """x [n, h] of all ranks to the slabs of their experts. Program (experts, worker): workers share rows.

    Args:
        ids int64 [n, k], weights float32 [n, k]; counts, psum int32 [L], written.
        lists: int32 [L, M], scratch.
        row_quads, quads: 16-byte pieces between rows of x, and of a row.
        publishes, takes: the halves. All that a program publishes it does before it waits.
    """
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    epoch = tl.load(state + EPOCH)
    failed = tl.load(state + FAILED)
    if publishes:
        epoch += 1
    _stamp(stamps, epoch, program, programs, 0, stamped)
    if publishes:
        if program < publishers:
            _publish(
                x, scales, ids, weights, peers, state, notice, program, rank, ranks, tokens, experts,
                row_quads, quads, scale_stride, groups, epoch, failed, lanes, slots, span, tile, block,
                group_block, width, publishers,
            )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(state + TICKETS, 1, sem="acq_rel", scope="gpu") == programs - 1:
            tl.store(state + TICKETS, 0)
            tl.store(state + EPOCH, epoch)
    if takes:
        failed = _await_routes(
            peers, rank, ranks, epoch, state, notice, limit, failed, publishers, width, clocked
        )
        for local in range(tl.program_id(0), local_experts, tl.num_programs(0)):
            rows = lists + local * slab_rows
            count = tl.zeros([], tl.int32)
            if failed == 0:
                count = _list_rows(
                    peers, rows, state, notice, rank, ranks, first_expert + local, slab_rows, span, scan,
                )  # fmt: skip
            if tl.program_id(1) == 0:
                tl.store(counts + local, count)
                tl.store(psum + local, local * slab_rows + count)
            _take_rows(
                peers, rows, local, count, rank, ranks, slab_rows, quads, groups, lanes, span, tile, block,
                group_block,
            )  # fmt: skip
    _stamp(stamps, epoch, program, programs, 1, stamped)


@triton.jit(do_not_specialize=["rank", "ranks", "tokens", "limit"])
def combine_kernel(
    ids, owners, own_slab, out, peers, state, notice, stamps, rank, ranks, tokens, hidden, limit,
    lanes: tl.constexpr, block: tl.constexpr, width: tl.constexpr, signals: tl.constexpr,
    takes: tl.constexpr, clocked: tl.constexpr, stamped: tl.constexpr,
):  # fmt: skip
    """out [n, h]: sums of the results that lie in the result slabs of the ranks of ``ids`` [n, k].

    owners int32 [E]; own_slab: of the dtype of results. Program: walks over (token, block of h). ``signals``,
    ``takes``: the halves.
    """
    epoch = tl.load(state + EPOCH)
    failed = tl.load(state + FAILED)
    program, programs = tl.program_id(0), tl.num_programs(0)
    _stamp(stamps, epoch, program, programs, 0, stamped)
    if signals:  # noqa: SIM102
        if program == 0:
            signal(peers, rank, ranks, RESULTS_STAGE, epoch, failed, width)
    if takes:
        peer = tl.arange(0, width)
        mine = peer < ranks
        flags = address_of(peers, FLAGS, ranks, rank).to(tl.pointer_type(tl.int32))
        where = flags + (RESULTS_STAGE * ranks + tl.where(mine, peer, 0)) * FLAG_WORDS
        failed = wait_for(
            where, peer, mine, RESULTS_STAGE + 1, epoch, state, notice, limit, failed, width, clocked
        )
        places = address_of(peers, PLACES, ranks, rank).to(tl.pointer_type(tl.int32))
        parts = (hidden + block - 1) // block
        for item in range(program, tokens * parts * (1 - failed), programs):
            token = item // parts
            column = item % parts * block + tl.arange(0, block)
            total = tl.zeros([block], tl.float32)
            for slot in tl.static_range(lanes):
                expert = tl.load(ids + token * lanes + slot)
                live = (column < hidden) & (expert >= 0)
                owner = tl.load(owners + tl.maximum(expert, 0))
                place = tl.load(places + token * lanes + slot, cache_modifier=".cg").to(tl.int64)
                slab = _section(peers, RESULT_SLAB, ranks, owner, own_slab.dtype.element_ty)
                part = tl.load(slab + place * hidden + column, mask=live, other=0.0, cache_modifier=".cg")
                total += part.to(tl.float32)
            to = out + token.to(tl.int64) * hidden + column
            tl.store(to, total.to(out.dtype.element_ty), mask=column < hidden)
    _stamp(stamps, epoch, program, programs, 1, stamped)


@triton.jit(do_not_specialize=["slab_rows", "quads"])
def copy_results_kernel(results, slab, counts, slab_rows, quads, tile: tl.constexpr, block: tl.constexpr):
    """The filled rows of results [L, M, h] into this rank's result slab. Program (expert, worker)."""
    words = quads * 4
    local = tl.program_id(0)
    count = tl.minimum(tl.load(counts + local), slab_rows)
    for first in range(tl.program_id(1) * tile, count, tl.num_programs(1) * tile):
        row = first + tl.arange(0, tile)
        live = row < count
        where = (local * slab_rows + row).to(tl.int64) * words
        for begin in range(0, words, block):
            column = begin + tl.arange(0, block)
            both = live[:, None] & (column < words)[None, :]
            values = tl.load(results + where[:, None] + column[None, :], mask=both, other=0)
            tl.store(slab + where[:, None] + column[None, :], values, mask=both)


@triton.jit(do_not_specialize=["rank", "ranks", "limit"])
def meet_kernel(
    peers, state, notice, rank, ranks, limit, stage: tl.constexpr, code: tl.constexpr,
    width: tl.constexpr, signals: tl.constexpr, waits: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """One program: raise this rank's flag of a stage, and return when all ranks have raised theirs."""
    meet(peers, rank, ranks, state, notice, limit, stage, code, width, signals, waits, clocked)


@triton.jit(do_not_specialize=["rank", "ranks", "limit"])
def await_routes_kernel(
    peers, state, notice, rank, ranks, limit,
    publishers: tl.constexpr, width: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """One program: return when all ranks have published."""
    epoch, failed = tl.load(state + EPOCH), tl.load(state + FAILED)
    _await_routes(peers, rank, ranks, epoch, state, notice, limit, failed, publishers, width, clocked)
