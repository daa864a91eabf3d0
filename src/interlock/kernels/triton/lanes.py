"""The two ends of an MoE layer: the choice of k experts for a token, and the sum over its k results."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def top_k_kernel(
    logits, bias, ids, weights, experts, logits_stride, scaling,
    top_k: tl.constexpr, slots: tl.constexpr, width: tl.constexpr,
    sigmoid: tl.constexpr, has_bias: tl.constexpr, normalise: tl.constexpr,
):  # fmt: skip
    """One token: the k best experts by score (+ bias, for the choice only), ids ascending.

    Scores are sigmoid or softmax of float32 logits; ties go to the smaller id; a bias never enters a weight.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, width)
    inside = expert < experts
    logit = tl.load(logits + token * logits_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if sigmoid:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        power = tl.exp(logit - tl.max(logit, axis=0))
        score = power / tl.sum(power, axis=0)
    choice = score + tl.load(bias + expert, mask=inside, other=0.0) if has_bias else score
    choice = tl.where(inside, choice, float("-inf"))
    slot = tl.arange(0, slots)
    chosen = tl.full([slots], 2147483647, tl.int32)
    weight = tl.zeros([slots], tl.float32)
    for index in tl.static_range(top_k):
        best = tl.argmax(choice, axis=0, tie_break_left=True)
        value = tl.sum(tl.where(expert == best, score, 0.0), axis=0)
        chosen = tl.where(slot == index, best, chosen)
        weight = tl.where(slot == index, value, weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if normalise:
        weight = weight / tl.sum(weight, axis=0)
    place = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), axis=1)
    tl.store(ids + token * top_k + place, chosen.to(tl.int64), mask=slot < top_k)
    tl.store(weights + token * top_k + place, weight * scaling, mask=slot < top_k)
