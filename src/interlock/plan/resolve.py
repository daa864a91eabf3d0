"""Options x model card x machine facts -> LaunchPlan, or a Refusal that says what would work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlock.errors import Refusal
from interlock.moe.a2a.backend import A2ABackend
from interlock.options import Options
from interlock.plan import decided as from_
from interlock.plan.a2a_buffers import Exchange, buffer_bytes
from interlock.plan.attention import CacheFormat, decide_attention
from interlock.plan.capacity import Limits, decide_limits, refuse_capacity_beyond
from interlock.plan.card import ModelCard
from interlock.plan.cut import cut_card
from interlock.plan.decided import Decided, asked_text, from_model, rule
from interlock.plan.device import Compute, decide_compute
from interlock.plan.disaggregation import decide_disaggregation
from interlock.plan.expert_parallelism import ExpertParallelism, decide_expert_parallelism
from interlock.plan.facts import MachineFacts
from interlock.plan.join import Declarations, Situation
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.memory import Fixed, PageSpaces, available_bytes, decide_pools, estimate, widest_window
from interlock.plan.moe_overlap import decide_overlap
from interlock.plan.nearest import with_alternatives
from interlock.plan.rehearsal import decide_rehearsal
from interlock.plan.server import server_items
from interlock.plan.stepping import decide_stepping
from interlock.plan.topology import World, decide_world
from interlock.plan.weight_format import LinearFormats, decide_linear_formats, offered_format
from interlock.plan.weights import (
    DTYPE_BYTES,
    Slices,
    activation_bytes,
    element_bytes,
    graph_bytes,
    kv_bytes_per_token,
    weight_bytes,
)


def resolve(
    options: Options,
    card: ModelCard,
    facts: MachineFacts,
    *,
    model_path: str | Path | None = None,
    declared: Declarations | None = None,
) -> LaunchPlan:
    """The launch plan.

    Args:
        model_path: folder of the checkpoint; the option ``model`` where it is a path already.
        declared: a2a backends and runners to join; everything registered by default.

    Raises:
        Refusal: the first rule that forbids the combination, with alternatives that were resolved and work.
    """
    declared = declared or Declarations.registered()
    path = str(model_path if model_path is not None else options.text("model") or "")

    def attempt(changed: Options) -> LaunchPlan:
        return _resolve(changed, card, facts, path, declared)

    try:
        return attempt(options)
    except Refusal as refusal:
        raise with_alternatives(refusal, options, attempt) from None


def _resolve(
    options: Options, card: ModelCard, facts: MachineFacts, model_path: str, declared: Declarations
) -> LaunchPlan:
    """Decide every item in order of dependence; the first rule that does not hold raises."""
    card, layers = cut_card(options, card)
    world = decide_world(options, card)
    compute = decide_compute(options, card, facts, world)
    rehearsal = decide_rehearsal(options, facts, world.ranks_per_gpu.value)
    situation = _situation(options, card, facts, world, compute)
    linears = decide_linear_formats(
        options, card, facts, world, kernels=compute.kernels.value, dtype=compute.dtype.value
    )
    moe = decide_expert_parallelism(options, card, declared, situation, world)
    disaggregation = decide_disaggregation(
        options, declared.transfers, facts, device=compute.device.value, nnodes=world.nnodes.value
    )
    mode = disaggregation.mode.value
    limits = decide_limits(options, world, moe.experts, compute.device.value, mode)
    refuse_capacity_beyond(moe.backend.max_capacity, moe.backend.name, limits, world.attn_tp_size)
    slices = _slices(world, compute, moe, linears)
    overlap = decide_overlap(options, card, moe.backend, declared, limits)
    exchange = _exchange(world, moe, halves=overlap.value)
    buffers = buffer_bytes(moe.backend, card, moe.experts, limits, exchange, slices.dtype_bytes)
    cache = CacheFormat(compute.kv_cache_dtype.value, limits.page_size.value)
    attention = decide_attention(options, card, declared.attention, situation, cache)
    attends = declared.attention[attention.value]
    stepping = decide_stepping(options, compute, world, limits, moe, attends, mode)
    fixed = Fixed(
        weights=weight_bytes(card, slices),
        a2a_buffers=buffers,
        activations=_activations(card, slices, limits, world, exchanging=moe.exchanges),
        graphs=graph_bytes(card, slices, stepping.cuda_graph_sizes.value),
    )
    extra = _window_extra(options, card)
    spaces = _page_spaces(card, world, limits, compute, extra.value)
    available = available_bytes(facts, compute.device.value, world)
    pools = decide_pools(options, card, world, limits, spaces, fixed, available, compute.device.value)
    items: dict[str, Decided[Any]] = {
        **_identity(options, card, model_path),
        **compute.items(),
        "attention_backend": attention,
        **linears.items(),
        "num_hidden_layers": layers,
        **world.items(),
        **moe.items(),
        **limits.items(),
        "moe_overlap": overlap,
        "moe_buffer_bytes": rule(buffers, _buffers_reason(moe.backend, exchange.sources)),
        "deterministic": from_.switch(options, "deterministic"),
        **stepping.items(),
        **pools.items(),
        "prefix_cache": from_.switch(options, "prefix_cache"),
        "sliding_window_extra": extra,
        **disaggregation.items(),
        **server_items(options, facts),
        **rehearsal.items(),
        "memory": rule(estimate(spaces, pools, fixed, available), "sum of the parts, on the largest rank"),
    }
    return _assemble(items)


def _buffers_reason(backend: A2ABackend, sources: int) -> str:
    when = "held from the start" if backend.fixed_capacity else "at most, while a step runs"
    return f"declared by --moe-a2a-backend {backend.name} for T of {sources} ranks, {when}"


def _situation(
    options: Options, card: ModelCard, facts: MachineFacts, world: World, compute: Compute
) -> Situation:
    return Situation(
        device=compute.device.value,
        kernels=compute.kernels.value,
        dtype=compute.dtype.value,
        weight_format=offered_format(options, card),
        quantization=options.text("quantization"),
        weight_block=card.weight_block,
        hidden_size=card.hidden_size,
        nnodes=world.nnodes.value,
        deterministic=options.switch("deterministic"),
        facts=facts,
        local_gpus=world.local_gpus,
        num_experts=card.experts.num_experts if card.experts else None,
        top_k=card.experts.top_k if card.experts else None,
    )


def _slices(world: World, compute: Compute, moe: ExpertParallelism, linears: LinearFormats) -> Slices:
    return Slices(
        attn_tp=world.attn_tp_size,
        ep=moe.ep.value,
        experts_tp=world.tp_size.value // moe.ep.value,
        dtype_bytes=DTYPE_BYTES[compute.dtype.value],
        expert_bytes=element_bytes(moe.weight_format.value),
        attention_bytes=element_bytes(linears.attention.value),
        mlp_bytes=element_bytes(linears.mlp.value),
    )


def _exchange(world: World, moe: ExpertParallelism, *, halves: bool) -> Exchange:
    return Exchange(
        sources=moe.ep.value if moe.exchanges else world.attn_dp_size.value,
        nodes=world.nnodes.value,
        mode=moe.mode.value,
        alignment=moe.runner.alignment if moe.runner else 1,
        halves=halves,
    )


def _assemble(items: Mapping[str, Decided[Any]]) -> LaunchPlan:
    values = {name: item.value for name, item in items.items()}
    provenance = {name: item.provenance for name, item in items.items()}
    return LaunchPlan(**values, provenance=provenance)


def _identity(options: Options, card: ModelCard, model_path: str) -> dict[str, Decided[Any]]:
    model = asked_text(options, "model") or rule(model_path, "the folder that was given")
    if options.is_set("demo_source") and model.value != "demo":
        raise Refusal(
            option="--demo-source",
            given=options.text("demo_source"),
            rule=f"only the model demo is made from a source, and MODEL is {model.value}",
            alternatives=["--demo-source auto"],
        )
    qkv = asked_text(options, "qkv_layout")
    if qkv is not None and not card.fused_qkv:
        raise Refusal(
            option="--qkv-layout",
            given=qkv.value,
            rule="this checkpoint keeps q, k and v in separate tensors, so the option would have no effect",
            alternatives=["--qkv-layout auto"],
        )
    found = "detected from the tensors" if card.fused_qkv else "q, k and v are separate tensors"
    return {
        "model": model,
        "model_path": rule(model_path, "where the checkpoint was found"),
        "model_family": from_model(card.family, f"architecture {card.architecture}"),
        "card": from_model(card, "config.json"),
        "served_model_name": asked_text(options, "served_model_name")
        or rule(Path(model.value).name or model.value, "last part of MODEL"),
        "load_format": from_.text(options, "load_format"),
        "qkv_layout": qkv or rule("auto", found),
        "seed": from_.integer(options, "seed"),
    }


def _window_extra(options: Options, card: ModelCard) -> Decided[int]:
    extra = from_.integer(options, "sliding_window_extra")
    if extra.value > 1:
        raise Refusal(
            option="--sliding-window-extra",
            given=extra.value,
            rule="a window of W is read as W keys (0) or W + 1 keys (1)",
            alternatives=["--sliding-window-extra 0", "--sliding-window-extra 1"],
        )
    if extra.value and widest_window(card, 0) is None:
        raise Refusal(
            option="--sliding-window-extra",
            given=extra.value,
            rule="this model has no sliding-window layers, so the option would have no effect",
            alternatives=["--sliding-window-extra 0"],
        )
    return extra


def _page_spaces(card: ModelCard, world: World, limits: Limits, compute: Compute, extra: int) -> PageSpaces:
    page, kv_bytes = limits.page_size.value, DTYPE_BYTES[compute.kv_cache_dtype.value]
    attn_tp = world.attn_tp_size
    return PageSpaces(
        page_size=page,
        full_page_bytes=page * kv_bytes_per_token(card, attn_tp, kv_bytes, window=False),
        window_page_bytes=page * kv_bytes_per_token(card, attn_tp, kv_bytes, window=True),
        window=widest_window(card, extra),
    )


def _activations(card: ModelCard, slices: Slices, limits: Limits, world: World, *, exchanging: bool) -> int:
    tokens = max(limits.chunked_prefill_size.value, limits.max_running_requests.value)
    own = max(limits.prefill_capacity.value, limits.decode_capacity.value)
    return activation_bytes(
        card,
        slices,
        tokens=tokens,
        moe_tokens=own * slices.ep if exchanging else tokens * world.attn_dp_size.value,
        logit_rows=limits.max_running_requests.value,
    )
