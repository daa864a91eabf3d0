"""Draws one token a row: truncation and lookup in one launch, a program for each row.

Thresholds are searched by sixteenths of the range of float bit patterns, in eight passes over a row's
logits, so nothing is sorted and the host waits for nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
WAYS: tl.constexpr = tl.constexpr(16)
ROUNDS: tl.constexpr = tl.constexpr(8)


@triton.jit
def _ordered(value):
    """int64 that orders as the float32 does; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def draw_kernel(
    logits, temperature, top_k, top_p, min_p, uniforms, out, width, stride, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    lane = tl.arange(0, block)
    way = tl.arange(0, WAYS).to(tl.int64)
    best = tl.full([block], float("-inf"), tl.float32)
    for start in range(0, width, block):
        at = start + lane
        best = tl.maximum(best, tl.load(x + at, mask=at < width, other=float("-inf")))
    top = tl.max(best, axis=0)
    heat = tl.load(temperature + row)
    least = tl.load(min_p + row).to(tl.float32)
    wanted_count = tl.load(top_k + row)

    low = tl.full([], -2147483648, tl.int64)
    if (wanted_count > 0) & (wanted_count < width):
        step = tl.full([], 268435456, tl.int64)
        for _ in range(ROUNDS):
            counts = tl.zeros([WAYS], tl.int64)
            bound = low + way * step
            for start in range(0, width, block):
                at = start + lane
                key = _ordered(tl.load(x + at, mask=at < width, other=float("-inf")))
                passes = (key[:, None] >= bound[None, :]) & (at < width)[:, None]
                counts += tl.sum(passes.to(tl.int64), axis=0)
            enough = tl.sum((counts >= wanted_count).to(tl.int64), axis=0)
            low += (enough - 1) * step
            step = step // WAYS

    total = tl.full([], 0.0, tl.float64)
    for start in range(0, width, block):
        at = start + lane
        value = tl.load(x + at, mask=at < width, other=float("-inf"))
        weight = tl.exp((value - top) / heat)
        kept = (at < width) & (weight >= least) & (_ordered(value) >= low)
        total += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64), axis=0)

    share = tl.load(top_p + row)
    floor = tl.full([], 0, tl.int64)
    if share < 1.0:
        step = tl.full([], 268435456, tl.int64)
        for _ in range(ROUNDS):
            sums = tl.zeros([WAYS], tl.float64)
            bound = floor + way * step
            for start in range(0, width, block):
                at = start + lane
                value = tl.load(x + at, mask=at < width, other=float("-inf"))
                weight = tl.exp((value - top) / heat)
                kept = (at < width) & (weight >= least) & (_ordered(value) >= low)
                weight = tl.where(kept, weight, 0.0)
                passes = _ordered(weight)[:, None] >= bound[None, :]
                sums += tl.sum(tl.where(passes, weight[:, None].to(tl.float64), 0.0), axis=0)
            enough = tl.sum((sums >= share * total).to(tl.int64), axis=0)
            floor += (enough - 1) * step
            step = step // WAYS
        total = tl.full([], 0.0, tl.float64)
        for start in range(0, width, block):
            at = start + lane
            value = tl.load(x + at, mask=at < width, other=float("-inf"))
            weight = tl.exp((value - top) / heat)
            kept = (at < width) & (weight >= least) & (_ordered(value) >= low) & (_ordered(weight) >= floor)
            total += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64), axis=0)

    target = tl.load(uniforms + row) * total
    running = tl.full([], 0.0, tl.float64)
    found = tl.full([], 2147483647, tl.int32)
    last = tl.full([], 0, tl.int32)
    for start in range(0, width, block):
        at = start + lane
        value = tl.load(x + at, mask=at < width, other=float("-inf"))
        weight = tl.exp((value - top) / heat)
        kept = (at < width) & (weight >= least) & (_ordered(value) >= low) & (_ordered(weight) >= floor)
        weight = tl.where(kept, weight, 0.0)
        ends = running + tl.cumsum(weight.to(tl.float64), axis=0)
        running += tl.sum(weight.to(tl.float64), axis=0)
        held = weight > 0.0
        found = tl.minimum(found, tl.min(tl.where(held & (ends > target), at, 2147483647), axis=0))
        last = tl.maximum(last, tl.max(tl.where(held, at, 0), axis=0))
    tl.store(out + row, tl.where(found < width, found, last).to(tl.int64))


def draw(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """See ``Kernels.draw``."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        draw_kernel[(rows,)](
            logits, temperature, top_k, top_p, min_p, uniforms, out, width, logits.stride(0),
            block=BLOCK, num_warps=8,
        )  # fmt: skip
    return out
