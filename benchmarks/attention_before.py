"""The attention kernel before it was tuned, kept for comparison by ``gpu_tune_attention.py``.

Paged causal attention: prefill and decode in one kernel, split over the keys where sequences are few.

A program owns some tokens of one sequence and one key-value head; the query heads that share it are packed as
rows (row r is token r // group, head r % group), so that keys and values are read once for all of them. Head
sizes need not be powers of two: 192 is computed as 128 + 64.

Splits write unnormalised results with their maximum and sum; ``merge_kernel`` joins them and counts the sink
once. Without splits the sink starts the running maximum and sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlock.kernels.triton.row_blocks import power_of_two

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
PREFILL_ROWS = 128
DECODE_PROGRAMS = 528
"""Programs aimed at in decode: four for each multiprocessor of an H200."""
MIN_SPLIT_KEYS = 256


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
def _attend(
    q, k_cache, v_cache, table, sinks, out, partial, stats, scale, window, total_tokens,
    sequence_start, sequence_tokens, length, block, kv_head, split,
    q_row, q_head, k_slot, v_slot,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    first_part: tl.constexpr, second_part: tl.constexpr, values: tl.constexpr, rows: tl.constexpr,
    tokens_a_block: tl.constexpr, keys_a_step: tl.constexpr, page_size: tl.constexpr, splits: tl.constexpr,
    has_window: tl.constexpr, has_sinks: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, rows)
    inside = block * tokens_a_block + row // group
    head = kv_head * group + row % group
    live = (row < tokens_a_block * group) & (inside < sequence_tokens)
    token = (sequence_start + inside).to(tl.int64)
    position = length - sequence_tokens + inside
    one = tl.arange(0, first_part)
    where = q + token[:, None] * q_row + head[:, None] * q_head
    query_1 = tl.load(where + one[None, :], mask=live[:, None] & (one[None, :] < width), other=0.0)
    if second_part > 0:
        two = first_part + tl.arange(0, second_part)
        query_2 = tl.load(where + two[None, :], mask=live[:, None] & (two[None, :] < width), other=0.0)
    first_position = length - sequence_tokens + block * tokens_a_block
    stop = tl.minimum(length, first_position + tokens_a_block)
    start = 0
    if has_window:
        start = tl.maximum(first_position - window + 1, 0) // keys_a_step * keys_a_step
    share = tl.cdiv(tl.cdiv(stop - start, splits), keys_a_step) * keys_a_step
    start += split * share
    stop = tl.minimum(stop, start + share)
    inner = tl.arange(0, values)
    largest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    if has_sinks and splits == 1:
        largest = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([rows], 1.0, tl.float32)
    result = tl.zeros([rows, values], tl.float32)
    for key in range(start, stop, keys_a_step):
        at = key + tl.arange(0, keys_a_step)
        held = at < stop
        if has_window:
            held = held & (at > first_position - window)
        page = tl.load(table + at // page_size, mask=held, other=0)
        slot = page.to(tl.int64) * page_size + at % page_size
        keys = k_cache + slot[None, :] * k_slot + kv_head * width
        part = tl.load(keys + one[:, None], mask=held[None, :] & (one[:, None] < width), other=0.0)
        logit = tl.dot(query_1, part.to(query_1.dtype), input_precision=precision)
        if second_part > 0:
            part = tl.load(keys + two[:, None], mask=held[None, :] & (two[:, None] < width), other=0.0)
            logit = tl.dot(query_2, part.to(query_1.dtype), logit, input_precision=precision)
        seen = held[None, :] & (at[None, :] <= position[:, None])
        if has_window:
            seen = seen & (at[None, :] > position[:, None] - window)
        logit = tl.where(seen, logit * (scale * LOG2E), float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logit, axis=1))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        power = tl.exp2(logit - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(power, axis=1)
        value = v_cache + slot[:, None] * v_slot + kv_head * value_width + inner[None, :]
        content = tl.load(value, mask=held[:, None] & (inner[None, :] < value_width), other=0.0)
        content = content.to(query_1.dtype)
        result = result * shrink[:, None]
        result = tl.dot(power.to(query_1.dtype), content, result, input_precision=precision)
        largest = new_largest
    mask = live[:, None] & (inner[None, :] < value_width)
    if splits == 1:
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        goal = out + (token[:, None] * heads + head[:, None]) * value_width + inner[None, :]
        tl.store(goal, result.to(out.dtype.element_ty), mask=mask)
    else:
        line = (split * total_tokens + token) * heads + head
        tl.store(partial + line[:, None] * value_width + inner[None, :], result, mask=mask)
        tl.store(stats + line * 2, largest, mask=live)
        tl.store(stats + line * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["window", "total_tokens", "sequences"])
def attention_kernel(
    q, k_cache, v_cache, page_table, query_start, kv_len, sinks, out, partial, stats,
    scale, window, total_tokens, sequences, table_stride, q_row, q_head, k_slot, v_slot,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    first_part: tl.constexpr, second_part: tl.constexpr, values: tl.constexpr, rows: tl.constexpr,
    tokens_a_block: tl.constexpr, keys_a_step: tl.constexpr, page_size: tl.constexpr, splits: tl.constexpr,
    has_window: tl.constexpr, has_sinks: tl.constexpr, precision: tl.constexpr, by_sequence: tl.constexpr,
):  # fmt: skip
    """Programs (block, kv head, split). ``by_sequence``: block i is sequence i, all its tokens in turn."""
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.program_id(0)
    block = 0
    if not by_sequence:
        sequence = _find_sequence(query_start, tl.program_id(0), sequences, tokens_a_block)
        block = tl.program_id(0) - tl.load(query_start + sequence) // tokens_a_block - sequence
    sequence_start = tl.load(query_start + sequence)
    sequence_tokens = tl.load(query_start + sequence + 1) - sequence_start
    blocks = tl.cdiv(sequence_tokens, tokens_a_block)
    length = tl.load(kv_len + sequence)
    table = page_table + sequence.to(tl.int64) * table_stride
    stop = blocks if by_sequence else tl.minimum(block + 1, blocks)
    for each in range(block, stop):
        _attend(
            q, k_cache, v_cache, table, sinks, out, partial, stats, scale, window, total_tokens,
            sequence_start, sequence_tokens, length, each, kv_head, split, q_row, q_head, k_slot, v_slot,
            heads, group, width, value_width, first_part, second_part, values, rows, tokens_a_block,
            keys_a_step, page_size, splits, has_window, has_sinks, precision,
        )  # fmt: skip


@triton.jit
def merge_kernel(
    partial, stats, sinks, query_start, out, total_tokens, sequences,
    heads: tl.constexpr, value_width: tl.constexpr, values: tl.constexpr, splits: tl.constexpr,
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
    result = tl.load(
        partial + line[:, None] * value_width + inner[None, :],
        mask=held[:, None] & (inner[None, :] < value_width), other=0.0,
    )  # fmt: skip
    merged = tl.sum(result * share[:, None], axis=0) / tl.where(bottom > 0.0, bottom, 1.0)
    tl.store(goal, merged.to(out.dtype.element_ty), mask=inner < value_width)


def head_parts(width: int) -> tuple[int, int]:
    """Split a head size into powers of two for the matrix units: 192 -> (128, 64), 128 -> (128, 0)."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, 0 if rest <= 0 else max(16, power_of_two(rest))


def key_splits(programs: int, max_keys: int) -> int:
    """How many programs share the keys of one sequence and head, from static sizes only."""
    wanted = DECODE_PROGRAMS // max(programs, 1)
    return max(1, min(64, wanted, -(-max_keys // MIN_SPLIT_KEYS)))


def paged_attention(
    q: torch.Tensor,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See ``Kernels.paged_attention``. The cache may also be e4m3 (values without a scale)."""
    tokens, heads, width = q.shape
    page_size, kv_heads, value_width = v_cache.shape[1:]
    sequences, group = kv_len.shape[0], heads // kv_heads
    decode = tokens <= sequences
    rows = max(16, power_of_two(group)) if decode else max(PREFILL_ROWS, power_of_two(group))
    tokens_a_block = 1 if decode else max(1, rows // group)
    max_keys = page_table.shape[1] * page_size
    if window is not None:
        max_keys = min(max_keys, window + tokens_a_block)
    splits = key_splits(sequences * kv_heads, max_keys) if decode else 1
    make = torch.empty if splits > 1 else torch.zeros
    out = make(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    if tokens == 0 or sequences == 0:
        return out
    partial = stats = None
    if splits > 1:
        partial = torch.empty(splits, tokens, heads, value_width, dtype=torch.float32, device=q.device)
        stats = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=q.device)
    first, second = head_parts(width)
    values = max(16, power_of_two(value_width))
    blocks = sequences if decode else tokens // tokens_a_block + sequences
    attention_kernel[(blocks, kv_heads, splits)](
        q, k_cache, v_cache, page_table, query_start, kv_len, sinks, out, partial, stats,
        scale, window or 0, tokens, sequences, page_table.stride(0), q.stride(0), q.stride(1),
        k_cache.stride(1), v_cache.stride(1),
        heads=heads, group=group, width=width, value_width=value_width, first_part=first, second_part=second,
        values=values, rows=rows, tokens_a_block=tokens_a_block, keys_a_step=64, page_size=page_size,
        splits=splits, has_window=window is not None, has_sinks=sinks is not None,
        precision="ieee" if q.dtype == torch.float32 else "tf32", by_sequence=decode,
        num_warps=4 if decode else 8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tokens, heads)](
            partial, stats, sinks, query_start, out, tokens, sequences,
            heads=heads, value_width=value_width, values=values, splits=splits,
            padded_splits=power_of_two(splits), has_sinks=sinks is not None,
            num_warps=1 if splits <= 8 else 4,
        )  # fmt: skip
    return out
