"""Paged causal attention on the device: prefill and decode, split over the keys where sequences are few.

A program owns some tokens of one sequence and one key-value head; the query heads that share it are packed as
rows (row r is token r // group, head r % group), so that keys and values are read once for all of them. Head
sizes need not be powers of two: 192 is computed as 128 + 64.

Splits write unnormalised results with their maximum and sum; ``merge_kernel`` joins them and counts the sink
once. Without splits the sink starts the running maximum and sum. Rows behind the last sequence become zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_sequence(query_start, block, sequences, tokens_a_block: tl.constexpr):
    """Largest i with query_start[i] // tokens_a_block + i <= block; every sequence owns one spare block."""
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // tokens_a_block + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _page_ids(
    table, key, first_seen, stop,
    keys_a_step: tl.constexpr, page_size: tl.constexpr, aligned: tl.constexpr, masked: tl.constexpr,
    has_window: tl.constexpr,
):  # fmt: skip
    """Page of each of the keys ``key : key + keys_a_step``; 0 for those outside first_seen : stop."""
    offset = tl.arange(0, keys_a_step)
    pages = table + (key // page_size + offset // page_size if aligned else (key + offset) // page_size)
    if masked:
        held = key + offset < stop
        if has_window and aligned:
            held = held & (key + offset >= first_seen)
        page = tl.load(pages, mask=held, other=0)
    else:
        page = tl.load(pages)
    return page


@triton.jit
def _step(
    key, page, first_seen, stop, position, window, factor, query_1, query_2, one, two, inner,
    k_head, v_head, k_slot, v_slot, largest, total, result,
    width: tl.constexpr, value_width: tl.constexpr, second_part: tl.constexpr, keys_a_step: tl.constexpr,
    page_size: tl.constexpr, aligned: tl.constexpr, masked: tl.constexpr, exact: tl.constexpr,
    one_token: tl.constexpr, has_window: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Take in keys ``key : key + keys_a_step``. ``masked``: some may lie outside first_seen : stop or be
    hidden from some rows; ``exact``: no head is padded; ``aligned``: steps begin and end with a page."""
    offset = tl.arange(0, keys_a_step)
    at = key + offset
    inside = offset % page_size if aligned else at % page_size
    page = page.to(tl.int64)
    if masked:
        held = at < stop
        if has_window and aligned:
            held = held & (at >= first_seen)
    keys = k_head + (page * (page_size * k_slot) + inside * k_slot)[None, :]
    value = v_head + (page * (page_size * v_slot) + inside * v_slot)[:, None] + inner[None, :]
    if masked and exact:
        part_1 = tl.load(keys + one[:, None], mask=held[None, :], other=0.0)
        if second_part > 0:
            part_2 = tl.load(keys + two[:, None], mask=held[None, :], other=0.0)
        content = tl.load(value, mask=held[:, None], other=0.0)
    elif masked:
        part_1 = tl.load(keys + one[:, None], mask=held[None, :] & (one[:, None] < width), other=0.0)
        if second_part > 0:
            part_2 = tl.load(keys + two[:, None], mask=held[None, :] & (two[:, None] < width), other=0.0)
        content = tl.load(value, mask=held[:, None] & (inner[None, :] < value_width), other=0.0)
    elif exact:
        part_1 = tl.load(keys + one[:, None])
        if second_part > 0:
            part_2 = tl.load(keys + two[:, None])
        content = tl.load(value)
    else:
        part_1 = tl.load(keys + one[:, None], mask=one[:, None] < width, other=0.0)
        if second_part > 0:
            part_2 = tl.load(keys + two[:, None], mask=two[:, None] < width, other=0.0)
        content = tl.load(value, mask=inner[None, :] < value_width, other=0.0)
    logit = tl.dot(query_1, part_1.to(query_1.dtype), input_precision=precision)
    if second_part > 0:
        logit = tl.dot(query_2, part_2.to(query_1.dtype), logit, input_precision=precision)
    if masked:
        seen = held[None, :]
        if not one_token:
            seen = seen & (at[None, :] <= position[:, None])
            if has_window:
                seen = seen & (at[None, :] > position[:, None] - window)
        logit = tl.where(seen, logit, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logit, axis=1) * factor)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest) if masked else new_largest
    power = tl.exp2(logit * factor - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(power, axis=1)
    result = result * shrink[:, None]
    result = tl.dot(
        power.to(query_1.dtype), content.to(query_1.dtype), result, input_precision=precision
    )  # fmt: skip
    return new_largest, total, result


@triton.jit
def _attend(
    q, k_cache, v_cache, table, sinks, out, partial, stats, scale, window, total_tokens,
    sequence_start, sequence_tokens, length, block, kv_head, split, splits,
    q_row, q_head, k_slot, v_slot,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    first_part: tl.constexpr, second_part: tl.constexpr, values: tl.constexpr, rows: tl.constexpr,
    tokens_a_block: tl.constexpr, keys_a_step: tl.constexpr, page_size: tl.constexpr,
    has_splits: tl.constexpr, has_window: tl.constexpr, has_sinks: tl.constexpr, precision: tl.constexpr,
    aligned: tl.constexpr, ids_ahead: tl.constexpr,
):  # fmt: skip
    exact: tl.constexpr = first_part + second_part == width and values == value_width
    one_token: tl.constexpr = tokens_a_block == 1
    first_position = length - sequence_tokens + block * tokens_a_block
    stop = tl.minimum(length, first_position + tokens_a_block)
    start = 0
    first_seen = 0
    if has_window:
        first_seen = tl.maximum(first_position - window + 1, 0)
        start = first_seen // page_size * page_size if aligned else first_seen
    if has_splits:
        share = tl.cdiv(tl.cdiv(stop - start, splits), keys_a_step) * keys_a_step
        start += split * share
        stop = tl.minimum(stop, start + share)
    if ids_ahead:
        page = _page_ids(table, start, first_seen, stop, keys_a_step, page_size, aligned, True, has_window)
    row = tl.arange(0, rows)
    inside = block * tokens_a_block + row // group
    head = kv_head * group + row % group
    live = (row < tokens_a_block * group) & (inside < sequence_tokens)
    token = (sequence_start + inside).to(tl.int64)
    position = length - sequence_tokens + inside
    one = tl.arange(0, first_part)
    where = q + token[:, None] * q_row + head[:, None] * q_head
    query_1 = tl.load(where + one[None, :], mask=live[:, None] & (one[None, :] < width), other=0.0)
    two = one
    query_2 = query_1
    if second_part > 0:
        two = first_part + tl.arange(0, second_part)
        query_2 = tl.load(where + two[None, :], mask=live[:, None] & (two[None, :] < width), other=0.0)
    inner = tl.arange(0, values)
    largest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if has_sinks and not has_splits:
        largest = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([rows], 1.0, tl.float32)
    result = tl.zeros([rows, values], tl.float32)
    factor = scale * LOG2E
    k_head = k_cache + kv_head * width
    v_head = v_cache + kv_head * value_width
    middle = start
    if not one_token and not has_window:
        middle = (first_position + 1) // keys_a_step * keys_a_step
        for key in range(start, middle, keys_a_step):
            ids = _page_ids(table, key, first_seen, stop, keys_a_step, page_size, aligned, False, has_window)
            largest, total, result = _step(
                key, ids, first_seen, stop, position, window, factor, query_1, query_2, one, two, inner,
                k_head, v_head, k_slot, v_slot, largest, total, result, width, value_width,
                second_part, keys_a_step, page_size, aligned, False, exact, one_token, has_window, precision,
            )  # fmt: skip
    for key in range(middle, stop, keys_a_step):
        if ids_ahead:
            ids = page
            page = _page_ids(
                table, key + keys_a_step, first_seen, stop, keys_a_step, page_size, aligned, True, has_window
            )
        else:
            ids = _page_ids(table, key, first_seen, stop, keys_a_step, page_size, aligned, True, has_window)
        largest, total, result = _step(
            key, ids, first_seen, stop, position, window, factor, query_1, query_2, one, two, inner,
            k_head, v_head, k_slot, v_slot, largest, total, result, width, value_width,
            second_part, keys_a_step, page_size, aligned, True, exact, one_token, has_window, precision,
        )  # fmt: skip
    mask = live[:, None] & (inner[None, :] < value_width)
    if has_splits:
        line = (split * total_tokens + token) * heads + head
        filled = mask & (start < stop)
        tl.store(partial + line[:, None] * value_width + inner[None, :], result, mask=filled)
        tl.store(stats + line * 2, largest, mask=live)
        tl.store(stats + line * 2 + 1, total, mask=live)
    else:
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        goal = out + (token[:, None] * heads + head[:, None]) * value_width + inner[None, :]
        tl.store(goal, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _clear_padding(
    out, first, filled, total_tokens, kv_head,
    heads: tl.constexpr, group: tl.constexpr, value_width: tl.constexpr, values: tl.constexpr,
    rows: tl.constexpr, tokens_a_block: tl.constexpr,
):  # fmt: skip
    """Zeros for this head's rows of tokens ``first : first + tokens_a_block`` from ``filled`` on."""
    row = tl.arange(0, rows)
    token = (first + row // group).to(tl.int64)
    mask = (row < tokens_a_block * group) & (token >= filled) & (token < total_tokens)
    inner = tl.arange(0, values)
    goal = out + (token * heads + kv_head * group + row % group)[:, None] * value_width + inner[None, :]
    zeros = tl.zeros([rows, values], out.dtype.element_ty)
    tl.store(goal, zeros, mask=mask[:, None] & (inner[None, :] < value_width))


@triton.jit(do_not_specialize=["window", "total_tokens", "sequences", "splits"])
def attention_kernel(
    q, k_cache, v_cache, page_table, query_start, kv_len, sinks, out, partial, stats,
    scale, window, total_tokens, sequences, splits, table_stride, q_row, q_head, k_slot, v_slot,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    first_part: tl.constexpr, second_part: tl.constexpr, values: tl.constexpr, rows: tl.constexpr,
    tokens_a_block: tl.constexpr, keys_a_step: tl.constexpr, page_size: tl.constexpr,
    has_splits: tl.constexpr, has_window: tl.constexpr, has_sinks: tl.constexpr, precision: tl.constexpr,
    by_sequence: tl.constexpr, aligned: tl.constexpr, ids_ahead: tl.constexpr,
):  # fmt: skip
    """Programs (block * kv heads + kv head, split): those that read the same pages run side by side, so that
    memory is read in long stretches. ``ids_ahead``: pages of a step are read a step before, those of the
    first before the queries (where one loop takes in all keys). ``by_sequence``: block i is sequence i, all
    its tokens in turn.

    Blocks of tokens run from the last to the first, so that those with the most keys begin first.
    """
    kv_heads: tl.constexpr = heads // group
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    sequence = tl.program_id(0) // kv_heads
    block = 0
    if not by_sequence:
        sequence = (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads
    place = sequence
    filled = tl.load(query_start + sequences)
    if not by_sequence:
        sequence = _find_sequence(query_start, place, sequences, tokens_a_block)
        block = place - tl.load(query_start + sequence) // tokens_a_block - sequence
    sequence_start = tl.load(query_start + sequence)
    sequence_tokens = tl.load(query_start + sequence + 1) - sequence_start
    length = tl.load(kv_len + sequence)
    blocks = tl.cdiv(sequence_tokens, tokens_a_block)
    table = page_table + sequence.to(tl.int64) * table_stride
    stop = blocks if by_sequence else tl.minimum(block + 1, blocks)
    for each in range(block, stop):
        _attend(
            q, k_cache, v_cache, table, sinks, out, partial, stats, scale, window, total_tokens,
            sequence_start, sequence_tokens, length, each, kv_head, split, splits,
            q_row, q_head, k_slot, v_slot,
            heads, group, width, value_width, first_part, second_part, values, rows, tokens_a_block,
            keys_a_step, page_size, has_splits, has_window, has_sinks, precision, aligned, ids_ahead,
        )  # fmt: skip
    if not has_splits:  # noqa: SIM102
        if place * tokens_a_block + tokens_a_block > filled:
            _clear_padding(
                out, place * tokens_a_block, filled, total_tokens, kv_head,
                heads, group, value_width, values, rows, tokens_a_block,
            )  # fmt: skip


@triton.jit(do_not_specialize=["total_tokens", "sequences", "splits"])
def merge_kernel(
    partial, stats, sinks, query_start, out, total_tokens, sequences, splits,
    heads: tl.constexpr, value_width: tl.constexpr, values: tl.constexpr,
    padded_splits: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """Join the splits of one (token, head), the sink counted once; padding tokens give zeros."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    inner = tl.arange(0, values)
    goal = out + (token * heads + head) * value_width + inner
    if token >= tl.load(query_start + sequences):
        tl.store(goal, tl.zeros([values], out.dtype.element_ty), mask=inner < value_width)
        return
    split = tl.arange(0, padded_splits)
    line = (split * total_tokens + token) * heads + head
    held = split < splits
    largest = tl.load(stats + line * 2, mask=held, other=float("-inf"))
    total = tl.load(stats + line * 2 + 1, mask=held, other=0.0)
    top = tl.max(largest, axis=0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(largest - top)
    bottom = tl.sum(share * total, axis=0)
    if has_sinks:
        bottom += tl.exp2(sink - top)
    used = largest > float("-inf")
    result = tl.load(
        partial + line[:, None] * value_width + inner[None, :],
        mask=used[:, None] & (inner[None, :] < value_width), other=0.0,
    )  # fmt: skip
    merged = tl.sum(result * share[:, None], axis=0) / tl.where(bottom > 0.0, bottom, 1.0)
    tl.store(goal, merged.to(out.dtype.element_ty), mask=inner < value_width)
