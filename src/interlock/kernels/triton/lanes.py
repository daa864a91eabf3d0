"""The two ends of an MoE layer: the choice of k experts for a token, and the sum over its k results."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def sum_lanes_kernel(rows, ids, out, hidden, lanes: tl.constexpr, block: tl.constexpr, has_ids: tl.constexpr):
    """out[t] = sum over lanes in ascending order in float32, lanes with id -1 skipped; rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], tl.float32)
    for lane in tl.static_range(lanes):
        live = inside
        if has_ids:
            live = inside & (tl.load(ids + token * lanes + lane) >= 0)
        total += tl.load(rows + (token * lanes + lane) * hidden + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def few_logits_kernel(
    x, weight, logits, tokens, x_stride,
    depth: tl.constexpr, experts: tl.constexpr, splits: tl.constexpr, block_e: tl.constexpr,
    chunk: tl.constexpr, width: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """logits[t, s * experts + e] = row t times expert e over the s-th share of the depth, in float32.

    For few tokens: the share of the weight stays in registers while the tokens pass by.

    early: launched while the kernel before still runs; the weight, which no kernel writes, is read meanwhile.
    """
    if early:
        gdc_launch_dependents()
    expert = tl.program_id(0) * block_e + tl.arange(0, block_e)
    split = tl.program_id(1)
    inside = tl.arange(0, width)
    column = split * chunk + inside
    held = (inside < chunk) & (column < depth)
    mine = expert < experts
    where = weight + expert[:, None] * depth + column[None, :]
    share = tl.load(where, mask=mine[:, None] & held[None, :], other=0.0).to(tl.float32)
    if early:
        gdc_wait()
    for token in range(tokens):
        row = tl.load(x + token * x_stride + column, mask=held, other=0.0).to(tl.float32)
        total = tl.sum(share * row[None, :], axis=1)
        tl.store(logits + token * (splits * experts) + split * experts + expert, total, mask=mine)


@triton.jit(do_not_specialize=["lanes"])
def count_lanes_kernel(ids, counts, lanes, block: tl.constexpr):
    """counts int64: counts[id + 1] grows by the number of lanes that name id; -1 counts at 0."""
    lane = tl.program_id(0) * block + tl.arange(0, block)
    live = lane < lanes
    expert = tl.load(ids + lane, mask=live, other=-1)
    tl.atomic_add(counts + expert + 1, tl.full([block], 1, tl.int64), mask=live, sem="relaxed")


LOWEST: tl.constexpr = tl.constexpr(-(2**31))
"""Below the key of every number."""
MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001)


@triton.jit
def ordered_key(values):
    """int32 in the order of the float32 values: a warp reduces integers in one instruction."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def sum_of_parts(where, experts, mask, parts: tl.constexpr):
    """Logits at ``where``: ``parts`` blocks of ``experts`` columns added in order; -inf where masked out."""
    logit = tl.load(where, mask=mask, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, parts):
        logit += tl.load(where + part * experts, mask=mask, other=0.0).to(tl.float32)
    return logit


@triton.jit(do_not_specialize=["live_tokens"])
def top_k_kernel(
    logits, bias, live, ids, weights, experts, logits_stride, live_tokens, scaling,
    top_k: tl.constexpr, slots: tl.constexpr, width: tl.constexpr, parts: tl.constexpr,
    sigmoid: tl.constexpr, has_bias: tl.constexpr, has_live: tl.constexpr, normalise: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """One token: the k best experts by score (+ bias, for the choice only), ids ascending.

    Logits are the sum of ``parts`` blocks of ``experts`` columns. Scores are sigmoid or softmax in float32;
    ties go to the smaller id; a bias never enters a weight. NaN counts as the best score, a logit of -inf is
    never chosen; unused slots are -1 with weight 0 and come last. Tokens at and beyond the number of live
    ones (``live`` on the device, else ``live_tokens``) get no expert at all. early: launched while the kernel
    before still runs.
    """
    if early:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, slots)
    limit = tl.load(live) if has_live else live_tokens
    if token >= limit:
        tl.store(ids + token * top_k + slot, tl.full([slots], -1, tl.int64), mask=slot < top_k)
        tl.store(weights + token * top_k + slot, tl.zeros([slots], tl.float32), mask=slot < top_k)
        return
    expert = tl.arange(0, width)
    inside = expert < experts
    row = logits + token * logits_stride
    logit = sum_of_parts(row + expert, experts, inside, parts)
    if sigmoid:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        highest = tl.max(logit, axis=0)
        power = tl.exp(logit - highest)
        total = tl.sum(power, axis=0)
        score = power / total
    choice = score + tl.load(bias + expert, mask=inside, other=0.0) if has_bias else score
    choice = tl.where(choice != choice, float("inf"), choice)
    key = ordered_key(tl.where(logit == float("-inf"), float("-inf"), choice))
    chosen = tl.full([slots], 0, tl.int32)
    chosen_by = tl.full([slots], LOWEST, tl.int32)
    for index in tl.static_range(top_k):
        best_key = tl.max(key, axis=0)
        best = tl.min(tl.where(key == best_key, expert, width), axis=0)
        chosen = tl.where(slot == index, best, chosen)
        chosen_by = tl.where(slot == index, best_key, chosen_by)
        key = tl.where(expert == best, LOWEST, key)
    used = chosen_by > MINUS_INFINITY
    picked = sum_of_parts(row + chosen, experts, used, parts)
    if sigmoid:
        weight = 1.0 / (1.0 + tl.exp(-picked))
    else:
        weight = tl.exp(picked - highest) / total
    weight = tl.where(used, weight, 0.0)
    chosen = tl.where(used, chosen, 2147483000 + slot)
    if normalise:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    place = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), axis=1)
    named = tl.where(used, chosen, -1).to(tl.int64)
    tl.store(ids + token * top_k + place, named, mask=slot < top_k)
    tl.store(weights + token * top_k + place, weight * scaling, mask=slot < top_k)
