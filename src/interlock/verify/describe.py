"""Attributions in words: what was seen, and what to look at first."""

from __future__ import annotations

from interlock.plan.card import ModelCard
from interlock.plan.launch_plan import LaunchPlan
from interlock.verify.attribute import Attribution, Flip, Origin

DIFFERING_ITEMS = (
    "kernels",
    "attention_backend",
    "dtype",
    "kv_cache_dtype",
    "moe_a2a_backend",
    "moe_runner_backend",
    "tp_size",
    "ep_size",
    "attn_dp_size",
    "threads",
    "deterministic",
    "moe_layout_prefill",
    "moe_layout_decode",
)
"""Plan items that may change the order of sums."""


def fault_text(found: Attribution, control: LaunchPlan) -> str:
    """Where the arms part beyond rounding, and a hint."""
    place = f"layer {found.layer}, {found.origin}, from position {found.position}"
    text = f"beyond rounding first in {place}: off by {found.size:.1e} of the row's largest entry"
    if found.details:
        text += f"; {found.details}"
    hint = _hint(found, control)
    return f"{text}; {hint}" if hint else text


def flip_text(flip: Flip) -> str:
    """Where experts differ, which, and how near the choice was."""
    left, joined = (", ".join(map(str, experts)) for experts in (flip.left, flip.joined))
    return (
        f"routing flip at layer {flip.layer}, position {flip.position}: expert {left} against {joined}, "
        f"{flip.gap:.1e} apart in {flip.unit}"
    )


def order_text(found: Attribution, control: LaunchPlan, candidate: LaunchPlan) -> str:
    """A difference of rounding size, where it begins, and which plan items may have caused it."""
    place = f"layer {found.layer}, {found.details}" if found.layer is not None else "the head"
    differing = differing_items(control, candidate)
    reason = f"the plans differ in {', '.join(differing)}" if differing else "though the plans are alike"
    return f"sums in another order, first seen in {place} (relative difference {found.size:.1e}); {reason}"


def differing_items(control: LaunchPlan, candidate: LaunchPlan) -> list[str]:
    """Items in which the plans differ and that may change the order of sums."""
    return [item for item in DIFFERING_ITEMS if getattr(control, item) != getattr(candidate, item)]


def _hint(found: Attribution, control: LaunchPlan) -> str:
    if found.origin is Origin.ATTENTION and found.layer is not None and found.position is not None:
        return _attention_hint(control.card, found.layer, found.position, control)
    if found.origin is Origin.WEIGHTS:
        return "look at renormalisation, scaling, and whether the selection bias entered the weights"
    if found.origin is Origin.CHOICE:
        return "look at the router's weights and selection bias"
    if found.origin is Origin.EXPERTS:
        return (
            "routes and weights agree, so look at the experts' weights and block scales, the map of experts "
            "to ranks, and dispatch and combine (padding rows too)"
        )
    if found.origin is Origin.DENSE:
        return "look at the MLP's weights and block scales"
    return ""


def _attention_hint(card: ModelCard, layer: int, position: int, plan: LaunchPlan) -> str:
    attention = card.layers[layer].attention
    window = attention.window
    if window is not None and position in (window - 1, window, window + 1):
        return f"the window of this layer is {window}, so look at the window and its edge"
    if position == 0:
        sinks = "the sinks, " if attention.has_sink else ""
        return (
            f"a first token sees only itself, so look at {sinks}the value scale and the projections' weights"
        )
    if position == 1:
        return "the first token agrees, whose rotation is nothing, so look at the rotary embedding"
    if position % plan.page_size == 0 or position % plan.chunked_prefill_size == 0:
        return f"pages hold {plan.page_size} tokens, so look at the KV pages and their table"
    return "earlier positions agree, so look at the KV pages of this text and at masks"
