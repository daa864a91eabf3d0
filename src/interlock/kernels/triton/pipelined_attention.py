"""Prefill attention on the matrix units: persistent programs with specialised warps, bfloat16.

Three roles: one warp finds the tiles, says what they are, and feeds queries and a ring of key and value
stages, page by page, through the bulk copy engine; two groups of four warps own 64 query rows each and run
unsynchronised, so that one takes exponentials while the other multiplies. Rows are (token, head of a group),
as in ``attention_kernels.py``; tiles of 128 rows are dealt out in turn, those with the most keys first.

Stages hold 64 channels side by side, pieces of 16 keys each; a step may take in keys that no row sees (behind
the last one a valid page again), whose scores are hidden and whose values are set to zero.

Legend: C = 64 channels, G = 16 keys of a piece, S keys a step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS: gl.constexpr = gl.constexpr(128)
HALF: gl.constexpr = gl.constexpr(64)
CHANNELS: gl.constexpr = gl.constexpr(64)
PIECE: gl.constexpr = gl.constexpr(16)
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
NOTES: gl.constexpr = gl.constexpr(7)
AHEAD: gl.constexpr = gl.constexpr(2)


@gluon.jit
def _turns(places, kv_heads: gl.constexpr):
    return (places * kv_heads + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _locate(turn, places, tables, sequences, window, kv_heads: gl.constexpr, group: gl.constexpr,
            has_window: gl.constexpr):  # fmt: skip
    """(kv head, place, sequence, first token, tokens from it on, its position, first key, end of keys) of
    this program's next tile; no keys where it holds no token. Every other turn runs through the programs
    backwards, so that none gets the longer tile each time."""
    query_start, kv_len = tables
    tokens_a_block: gl.constexpr = ROWS // group
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tile = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    exists = tile < places * kv_heads
    kv_head = tile % kv_heads
    place = gl.where(exists, places - 1 - tile // kv_heads, 0)
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(query_start + middle) // tokens_a_block + middle <= place:
            low = middle
        else:
            high = middle - 1
    start = gl.load(query_start + low)
    count = gl.load(query_start + low + 1) - start
    length = gl.load(kv_len + low)
    first = (place - start // tokens_a_block - low) * tokens_a_block
    position = length - count + first
    end = gl.where(exists & (first < count), gl.minimum(length, position + tokens_a_block), 0)
    key = 0
    if has_window:
        key = gl.maximum(position - window + 1, 0) // PIECE * PIECE
    return kv_head, place, low, start + first, count - first, position, key, end


@gluon.jit
def _note(notes, turn, at: gl.constexpr, value):
    """Every lane writes the same number, so that the one that arrives has written it too."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes.index(turn % AHEAD * NOTES + at).store(gl.full([1], 0, gl.int32, layout) + value)


@gluon.jit
def _read(notes, turn, at: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(notes.index(turn % AHEAD * NOTES + at).load(layout), axis=0)


@gluon.jit
def _copy_queries(
    q, queries, full, empty, tile, first, kv_head,
    group: gl.constexpr, k_parts: gl.constexpr, slots: gl.constexpr,
):  # fmt: skip
    """The tile's 128 rows: 64 for each group of warps, 64 channels side by side."""
    tokens: gl.constexpr = HALF // group if group < HALF else 1
    heads: gl.constexpr = group if group < HALF else HALF
    boxes = queries._reinterpret(gl.bfloat16, [slots * 2 * k_parts, tokens, heads, CHANNELS], q.layout)
    slot = tile % slots
    mbarrier.wait(empty.index(slot), (tile // slots & 1) ^ 1)
    mbarrier.expect(full.index(slot), ROWS * k_parts * CHANNELS * 2)
    for half in gl.static_range(2):
        token = first + half * HALF // group
        head = kv_head * group + half * HALF % group
        for part in gl.static_range(k_parts):
            tma.async_copy_global_to_shared(
                q, [token, head, part * CHANNELS], full.index(slot),
                boxes.index((slot * 2 + half) * k_parts + part),
            )  # fmt: skip


@gluon.jit
def _feed(
    q, queries, k_cache, v_cache, ring, desk, page_table, table_stride, tables, window, sequences, places,
    kv_heads: gl.constexpr, group: gl.constexpr, width: gl.constexpr, value_width: gl.constexpr,
    page_size: gl.constexpr, keys: gl.constexpr, stages: gl.constexpr, slots: gl.constexpr,
    has_window: gl.constexpr,
):  # fmt: skip
    k_stages, v_stages, k_full, v_full, k_empty, v_empty = ring
    notes, told, heard, q_full, q_empty = desk
    pieces: gl.constexpr = keys // PIECE
    k_parts: gl.constexpr = width // CHANNELS
    v_parts: gl.constexpr = value_width // CHANNELS
    k_pieces = k_stages._reinterpret(
        gl.bfloat16, [stages * k_parts * pieces, PIECE, CHANNELS], k_cache.layout
    )
    v_pieces = v_stages._reinterpret(
        gl.bfloat16, [stages * v_parts * pieces, PIECE, CHANNELS], v_cache.layout
    )
    count = 0
    tile = 0
    for turn in range(_turns(places, kv_heads)):
        kv_head, place, sequence, first_token, tokens, position, first, end = _locate(
            turn, places, tables, sequences, window, kv_heads, group, has_window
        )
        mbarrier.wait(heard.index(turn % AHEAD), (turn // AHEAD & 1) ^ 1)
        _note(notes, turn, 0, kv_head)
        _note(notes, turn, 1, place)
        _note(notes, turn, 2, first_token)
        _note(notes, turn, 3, tokens)
        _note(notes, turn, 4, position)
        _note(notes, turn, 5, first)
        _note(notes, turn, 6, end)
        mbarrier.arrive(told.index(turn % AHEAD))
        table = page_table + sequence.to(gl.int64) * table_stride
        last = (end - 1) // PIECE
        for key in range(first, end, keys):
            stage = count % stages
            phase = (count // stages & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), keys * width * 2)
            for piece in gl.static_range(pieces):
                at = gl.minimum(key // PIECE + piece, last) * PIECE
                row = gl.load(table + at // page_size) * page_size + at % page_size
                for part in gl.static_range(k_parts):
                    tma.async_copy_global_to_shared(
                        k_cache, [row, kv_head * width + part * CHANNELS], k_full.index(stage),
                        k_pieces.index((stage * k_parts + part) * pieces + piece),
                    )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), keys * value_width * 2)
            for piece in gl.static_range(pieces):
                at = gl.minimum(key // PIECE + piece, last) * PIECE
                row = gl.load(table + at // page_size) * page_size + at % page_size
                for part in gl.static_range(v_parts):
                    tma.async_copy_global_to_shared(
                        v_cache, [row, kv_head * value_width + part * CHANNELS], v_full.index(stage),
                        v_pieces.index((stage * v_parts + part) * pieces + piece),
                    )  # fmt: skip
            count += 1
            if key == first:
                _copy_queries(q, queries, q_full, q_empty, tile, first_token, kv_head, group, k_parts, slots)
                tile += 1


@gluon.jit
def _take(
    key, count, first_seen, end, position, window, factor, queries, own_part, ring, largest, total, left,
    right, k_parts: gl.constexpr, keys: gl.constexpr, stages: gl.constexpr,
    masked: gl.constexpr, has_window: gl.constexpr, scores: gl.constexpr, results: gl.constexpr,
):  # fmt: skip
    """Take in keys ``key : key + keys``. ``masked``: some are hidden from some rows or lie behind ``end``."""
    k_stages, v_stages, k_full, v_full, k_empty, v_empty = ring
    stage = count % stages
    phase = count // stages & 1
    mbarrier.wait(k_full.index(stage), phase)
    logit = warpgroup_mma(
        queries.index(own_part), k_stages.index(stage * k_parts).permute((1, 0)),
        gl.zeros([HALF, keys], gl.float32, scores), use_acc=False, is_async=True,
    )  # fmt: skip
    for part in gl.static_range(1, k_parts):
        logit = warpgroup_mma(
            queries.index(own_part + part), k_stages.index(stage * k_parts + part).permute((1, 0)),
            logit, is_async=True,
        )  # fmt: skip
    logit = warpgroup_mma_wait(0, deps=[logit])
    mbarrier.arrive(k_empty.index(stage))
    if masked:
        at = gl.expand_dims(key + gl.arange(0, keys, gl.SliceLayout(0, scores)), 0)
        own = gl.expand_dims(position, 1)
        seen = at <= own
        if has_window:
            seen = seen & (at > own - window)
        logit = gl.where(seen, logit, float("-inf"))
    new_largest = gl.maximum(largest, gl.max(logit, axis=1) * factor)
    base = gl.where(new_largest == float("-inf"), 0.0, new_largest) if masked else new_largest
    power = gl.exp2(logit * factor - gl.expand_dims(base, 1))
    shrink = gl.exp2(largest - base)
    total = total * shrink + gl.sum(power, axis=1)
    weight = gl.convert_layout(power.to(gl.bfloat16), gl.DotOperandLayout(0, results, 2))
    spread = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, results)), 1)
    left = left * spread
    right = right * spread
    mbarrier.wait(v_full.index(stage), phase)
    if masked:  # noqa: SIM102
        if (key + keys > end) | (key < first_seen):
            rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            behind = key + gl.arange(0, keys, gl.SliceLayout(1, rows))
            held = gl.expand_dims((behind >= first_seen) & (behind < end), 1)
            for part in gl.static_range(2):
                value = v_stages.index(stage * 2 + part)
                value.store(gl.where(held, value.load(rows), 0.0))
            fence_async_shared()
    left = warpgroup_mma(weight, v_stages.index(stage * 2), left, is_async=True)
    right = warpgroup_mma(weight, v_stages.index(stage * 2 + 1), right, is_async=True)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    mbarrier.arrive(v_empty.index(stage))
    return new_largest, total, left, right, count + 1


@gluon.jit
def _attend(
    queries, ring, desk, sinks, out, tables, factor, window, total_tokens, sequences, places,
    half: gl.constexpr, heads: gl.constexpr, kv_heads: gl.constexpr, group: gl.constexpr,
    k_parts: gl.constexpr, keys: gl.constexpr, stages: gl.constexpr, slots: gl.constexpr,
    has_window: gl.constexpr, has_sinks: gl.constexpr,
):  # fmt: skip
    """Rows half * 64 : half * 64 + 64 of this program's tiles."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])
    results: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHANNELS, 16])
    notes, told, heard, q_full, q_empty = desk
    tokens_a_block: gl.constexpr = ROWS // group
    value_width: gl.constexpr = 2 * CHANNELS
    filled = gl.load(tables[0] + sequences)
    count = 0
    tile = 0
    for turn in range(_turns(places, kv_heads)):
        mbarrier.wait(told.index(turn % AHEAD), turn // AHEAD & 1)
        kv_head = _read(notes, turn, 0)
        place = _read(notes, turn, 1)
        first = _read(notes, turn, 2)
        tokens = _read(notes, turn, 3)
        position = _read(notes, turn, 4)
        key = _read(notes, turn, 5)
        end = _read(notes, turn, 6)
        mbarrier.arrive(heard.index(turn % AHEAD))
        row = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, results))
        head = kv_head * group + row % group
        column = gl.expand_dims(gl.arange(0, CHANNELS, gl.SliceLayout(0, results)), 0)
        if (place + 1) * tokens_a_block > filled:
            token = (place * tokens_a_block + row // group).to(gl.int64)
            goal = out + gl.expand_dims((token * heads + head) * value_width, 1) + column
            mask = gl.expand_dims((token >= filled) & (token < total_tokens), 1)
            nothing = gl.zeros([HALF, CHANNELS], gl.bfloat16, results)
            gl.store(goal, nothing, mask=mask)
            gl.store(goal + CHANNELS, nothing, mask=mask)
        if key < end:
            own_part = (tile % slots * 2 + half) * k_parts
            mbarrier.wait(q_full.index(tile % slots), tile // slots & 1)
            own = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores))
            own_position = position + own // group
            largest = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
            total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, scores))
            if has_sinks:
                largest = gl.load(sinks + kv_head * group + own % group).to(gl.float32) * LOG2E
                total = total + 1.0
            left = gl.zeros([HALF, CHANNELS], gl.float32, results)
            right = left
            middle = key
            first_seen = gl.maximum(position - window + 1, 0) if has_window else 0
            if not has_window:
                middle = (position + 1) // keys * keys
                for at in range(key, middle, keys):
                    largest, total, left, right, count = _take(
                        at, count, first_seen, end, own_position, window, factor, queries, own_part, ring,
                        largest, total, left, right, k_parts, keys, stages, False, has_window, scores,
                        results,
                    )  # fmt: skip
            for at in range(middle, end, keys):
                largest, total, left, right, count = _take(
                    at, count, first_seen, end, own_position, window, factor, queries, own_part, ring,
                    largest, total, left, right, k_parts, keys, stages, True, has_window, scores, results,
                )  # fmt: skip
            mbarrier.arrive(q_empty.index(tile % slots))
            tile += 1
            share = gl.convert_layout(1.0 / gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, results))
            token = (first + row // group).to(gl.int64)
            goal = out + gl.expand_dims((token * heads + head) * value_width, 1) + column
            mask = gl.expand_dims(row // group < tokens, 1)
            gl.store(goal, (left * gl.expand_dims(share, 1)).to(gl.bfloat16), mask=mask)
            gl.store(goal + CHANNELS, (right * gl.expand_dims(share, 1)).to(gl.bfloat16), mask=mask)


@gluon.jit
def _ring(k_cache, v_cache, width: gl.constexpr, keys: gl.constexpr, stages: gl.constexpr):
    k_stages = gl.allocate_shared_memory(
        gl.bfloat16, [stages * (width // CHANNELS), keys, CHANNELS], k_cache.layout
    )
    v_stages = gl.allocate_shared_memory(gl.bfloat16, [stages * 2, keys, CHANNELS], v_cache.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(stages):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    return k_stages, v_stages, k_full, v_full, k_empty, v_empty


@gluon.jit
def _desk(slots: gl.constexpr):
    """Where the feeding warp says what the next tiles are, and that their queries are there."""
    notes = gl.allocate_shared_memory(gl.int32, [AHEAD * NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(AHEAD):
        mbarrier.init(told.index(index), count=1)
        mbarrier.init(heard.index(index), count=2)
    q_full = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(slots):
        mbarrier.init(q_full.index(index), count=1)
        mbarrier.init(q_empty.index(index), count=2)
    return notes, told, heard, q_full, q_empty


@gluon.jit(do_not_specialize=["window", "total_tokens", "sequences", "places"])
def pipelined_attention_kernel(
    q, k_cache, v_cache, page_table, query_start, kv_len, sinks, out,
    scale, window, total_tokens, sequences, places, table_stride,
    heads: gl.constexpr, kv_heads: gl.constexpr, width: gl.constexpr, value_width: gl.constexpr,
    page_size: gl.constexpr, keys: gl.constexpr, stages: gl.constexpr, slots: gl.constexpr,
    has_window: gl.constexpr, has_sinks: gl.constexpr,
):  # fmt: skip
    """q: descriptor over [tokens, heads, width] in boxes of 64 rows by 64 channels; k_cache and v_cache:
    descriptors of [slots, kv heads * channels] in boxes of 16 x 64; value_width is 128, width 64, 128 or 192,
    heads / kv heads a power of two up to 128, and pages hold a multiple of 16 keys.

    slots: tiles whose queries are held at once.
    """
    group: gl.constexpr = heads // kv_heads
    k_parts: gl.constexpr = width // CHANNELS
    ring = _ring(k_cache, v_cache, width, keys, stages)
    desk = _desk(slots)
    queries = gl.allocate_shared_memory(gl.bfloat16, [slots * 2 * k_parts, HALF, CHANNELS], k_cache.layout)
    tables = (query_start, kv_len)
    factor = scale * LOG2E
    gl.warp_specialize(
        [
            (_attend, (queries, ring, desk, sinks, out, tables, factor, window, total_tokens, sequences,
                       places, 0, heads, kv_heads, group, k_parts, keys, stages, slots, has_window,
                       has_sinks)),
            (_attend, (queries, ring, desk, sinks, out, tables, factor, window, total_tokens, sequences,
                       places, 1, heads, kv_heads, group, k_parts, keys, stages, slots, has_window,
                       has_sinks)),
            (_feed, (q, queries, k_cache, v_cache, ring, desk, page_table, table_stride, tables, window,
                     sequences, places, kv_heads, group, width, value_width, page_size, keys, stages, slots,
                     has_window)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
