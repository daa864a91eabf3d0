"""The row lists of a decode step in one launch: programs count all lanes themselves instead of waiting for
each other's counts in a launch of their own.

A few thousand lanes are read and counted in one or two microseconds, less than a launch costs; for more,
``route_lists`` counts once. What the lists hold, and the legend: there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from interlock.kernels.triton.quantise import quantise_part
from interlock.kernels.triton.route_lists import rank_in_part, store_blocks


@triton.jit
def _counts(ids, lanes, first, step: tl.constexpr, bins: tl.constexpr):
    """int32 [bins] twice: lanes of each expert, and those before lane ``first``; the last bin is none's."""
    counts = tl.zeros([bins], tl.int32)
    before = tl.zeros([bins], tl.int32)
    for start in range(0, lanes, step):
        lane = start + tl.arange(0, step)
        expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
        expert = tl.where(expert < 0, bins - 1, expert)
        counts += tl.histogram(expert, bins)
        if start < first:
            before += tl.histogram(tl.where(lane < first, expert, bins - 1), bins)
    order = tl.arange(0, bins)
    return tl.where(order < bins - 1, counts, 0), tl.where(order < bins - 1, before, 0)


@triton.jit
def _place(
    ids, weights, source, target, weight, places, lanes, k, first,
    has_weights: tl.constexpr, step: tl.constexpr, part: tl.constexpr, bins: tl.constexpr,
):  # fmt: skip
    """Write lanes ``first : first + part`` at their places."""
    counts, before = _counts(ids, lanes, first, step, bins)
    leads = tl.cumsum(counts, axis=0) - counts + before
    lane = first + tl.arange(0, part)
    expert = tl.load(ids + lane, mask=lane < lanes, other=-1).to(tl.int32)
    live = expert >= 0
    rank = rank_in_part(ids, expert, first, 0, lanes, part, 16)
    place = tl.gather(leads, tl.where(live, expert, 0), axis=0) + rank
    tl.store(places + lane, tl.where(live, place, -1), mask=lane < lanes)
    tl.store(target + place, lane, mask=live)
    tl.store(source + place, lane // k, mask=live)
    if has_weights:
        tl.store(weight + place, tl.load(weights + lane, mask=live, other=0.0), mask=live)


@triton.jit
def _lists(
    ids, weights, source, target, weight, places, blocks, block_count, lanes, k, max_blocks, program,
    has_weights: tl.constexpr, step: tl.constexpr, part: tl.constexpr, bins: tl.constexpr,
    block_rows: tl.constexpr,
):  # fmt: skip
    """Program 0 cuts the blocks; the others place ``part`` lanes each."""
    if program == 0:
        counts, _ = _counts(ids, lanes, 0, step, bins)
        starts = tl.cumsum(counts, axis=0) - counts
        store_blocks(counts, starts, tl.arange(0, bins), blocks, block_count, max_blocks, block_rows)
    else:
        _place(
            ids, weights, source, target, weight, places, lanes, k, (program - 1) * part,
            has_weights, step, part, bins,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lanes", "max_blocks"])
def lists_kernel(
    ids, weights, source, target, weight, places, blocks, block_count, lanes, k, max_blocks,
    has_weights: tl.constexpr, step: tl.constexpr, part: tl.constexpr, bins: tl.constexpr,
    block_rows: tl.constexpr,
):  # fmt: skip
    """1 + ceil(lanes / part) programs; more experts than bins - 1 do not fit."""
    _lists(
        ids, weights, source, target, weight, places, blocks, block_count, lanes, k, max_blocks,
        tl.program_id(0), has_weights, step, part, bins, block_rows,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lanes", "max_blocks", "scale_stride"])
def lists_quantise_kernel(
    ids, weights, source, target, weight, places, blocks, block_count, lanes, k, max_blocks,
    x, out, scales, row_stride, scale_stride,
    has_weights: tl.constexpr, step: tl.constexpr, part: tl.constexpr, bins: tl.constexpr,
    block_rows: tl.constexpr, depth: tl.constexpr, groups: tl.constexpr,
):  # fmt: skip
    """``lists_kernel`` in the first programs, ``quantise.quantise_kernel`` in the others."""
    programs = 1 + (lanes + part - 1) // part
    program = tl.program_id(0)
    if program < programs:
        _lists(
            ids, weights, source, target, weight, places, blocks, block_count, lanes, k, max_blocks,
            program, has_weights, step, part, bins, block_rows,
        )  # fmt: skip
    else:
        rest = program - programs
        parts: tl.constexpr = (depth + groups * 128 - 1) // (groups * 128)
        row = (rest // parts).to(tl.int64)
        quantise_part(x, out, scales, row, rest % parts, row_stride, depth, groups, scale_stride)
