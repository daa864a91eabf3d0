"""Receipts: what the running engine observed for each plan item, matched with the plan.

A receipt of a rank is ``{item: observed value}``. What every MoE layer must show is read from the entry
``moe_layers``, a list with one mapping for each layer built (``MoELayer.observed``), which must be exactly
the model's MoE layers. Every field of ``LaunchPlan`` has one entry in ``RULES``: where it must be observed,
or why it cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from interlock.options import OPTIONS
from interlock.plan.launch_plan import LaunchPlan

Observed = Mapping[int, Mapping[str, object]]


class Where(Enum):
    """Who must show a receipt."""

    RANK = "every rank"
    LEADER = "the first rank of every attention replica"
    LAYER = "every MoE layer of every rank"
    NOWHERE = "nobody"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one item is matched.

    Attributes:
        reason: why nobody can show a receipt (``NOWHERE`` only).
        expected: (plan, rank) -> value to be observed; the plan's own value by default.
        agrees: (expected, observed) -> bool; equality by default.
        applies: (plan) -> whether the item exists in this launch.
        path: where a layer's receipt holds the value (``LAYER`` only).
    """

    where: Where
    reason: str = ""
    expected: Callable[[LaunchPlan, int], object] | None = None
    agrees: Callable[[object, object], bool] = lambda expected, observed: bool(expected == observed)
    applies: Callable[[LaunchPlan], bool] = lambda plan: True
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One item whose receipt differs or is missing.

    Attributes:
        option: flag that sets the item, or the item's name where a rule set it.
        observed: None where the receipt is missing.
        observer: who observed it, where that is not a rank.
    """

    item: str
    option: str
    rank: int
    layer: int | None
    expected: object
    observed: object
    observer: str = ""

    def __str__(self) -> str:
        where = self.observer or f"rank {self.rank}" + ("" if self.layer is None else f", layer {self.layer}")
        planned = f"{self.option}: the plan says {self.item} = {self.expected}"
        if self.observed is None:
            return f"{planned}, and {where} shows no receipt for it"
        return f"{planned}, but {where} {'has' if self.observer else 'observed'} {self.observed}"


def _at_most(expected: object, observed: object) -> bool:
    return isinstance(expected, int) and isinstance(observed, int) and 0 <= observed <= expected


def _promised_and_kept(expected: object, observed: object) -> bool:
    """What was promised must hold; what was not promised may hold all the same."""
    return observed is True or expected is False


def _same_sizes(expected: object, observed: object) -> bool:
    """Sizes may have become a list on their way."""
    return (
        isinstance(expected, list | tuple)
        and isinstance(observed, list | tuple)
        and [*expected] == [*observed]
    )


def _has_experts(plan: LaunchPlan) -> bool:
    return plan.card.num_moe_layers > 0


def _has_dense_layers(plan: LaunchPlan) -> bool:
    return not all(layer.is_moe for layer in plan.card.layers)


def _has_windows(plan: LaunchPlan) -> bool:
    return any(layer.attention.window is not None for layer in plan.card.layers)


def _is_disaggregated(plan: LaunchPlan) -> bool:
    return plan.disaggregation_mode != "none"


def _layer(*path: str) -> Rule:
    return Rule(Where.LAYER, applies=_has_experts, path=path)


def _calls(*path: str) -> Rule:
    return Rule(
        Where.LAYER,
        expected=lambda plan, rank: "at least 1 call",
        agrees=lambda expected, observed: isinstance(observed, int) and observed >= 1,
        applies=_has_experts,
        path=path,
    )


def _nowhere(reason: str) -> Rule:
    return Rule(Where.NOWHERE, reason=reason)


_RANK: Final = Rule(Where.RANK)
_LEADER: Final = Rule(Where.LEADER)
_HTTP: Final = "acts in the HTTP front end only, where every client sees it"

RULES: Final[Mapping[str, Rule]] = {
    "model": _nowhere("a name for people; model_path is what is loaded"),
    "model_path": _RANK,
    "model_family": _RANK,
    "card": _nowhere("every tensor's name and shape is checked against it while loading"),
    "served_model_name": _nowhere(_HTTP),
    "load_format": _RANK,
    "qkv_layout": Rule(Where.RANK, applies=lambda plan: plan.card.fused_qkv and plan.qkv_layout != "auto"),
    "dtype": _RANK,
    "kv_cache_dtype": _RANK,
    "attention_weight_format": _RANK,
    "mlp_weight_format": Rule(Where.RANK, applies=_has_dense_layers),
    "expert_weight_format": _layer("weight_format"),
    "num_hidden_layers": _RANK,
    "device": _RANK,
    "kernels": _RANK,
    "attention_backend": _RANK,
    "threads": _RANK,
    "seed": _RANK,
    "tp_size": _RANK,
    "ep_size": _RANK,
    "attn_dp_size": _RANK,
    "nnodes": _RANK,
    "node_rank": Rule(Where.RANK, expected=lambda plan, rank: rank // (plan.tp_size // plan.nnodes)),
    "ranks_per_gpu": _RANK,
    "nccl_library": Rule(Where.RANK, applies=lambda plan: plan.nccl_library != ""),
    "dist_init": _nowhere("without it no rank could have joined the world, whose size is observed"),
    "moe_a2a_backend": _layer("a2a_backend"),
    "moe_a2a_mode": Rule(Where.RANK, applies=lambda plan: plan.moe_a2a_mode != ""),
    "moe_runner_backend": _layer("runner_backend"),
    "moe_layout_prefill": _layer("layouts", "prefill"),
    "moe_layout_decode": _layer("layouts", "decode"),
    "moe_prefill_capacity": _layer("capacity", "prefill"),
    "moe_decode_capacity": _layer("capacity", "decode"),
    "moe_overlap": Rule(
        Where.LAYER,
        applies=_has_experts,
        path=("overlapped",),
        agrees=lambda expected, observed: observed is expected,
    ),
    "moe_buffer_bytes": Rule(Where.RANK, agrees=_at_most, applies=_has_experts),
    "deterministic": Rule(Where.RANK, agrees=_promised_and_kept),
    "max_model_len": _LEADER,
    "max_running_requests": _LEADER,
    "chunked_prefill_size": _LEADER,
    "cuda_graph_sizes": Rule(Where.RANK, agrees=_same_sizes),
    "overlap_schedule": _LEADER,
    "page_size": _RANK,
    "full_pages": _RANK,
    "window_pages": _RANK,
    "prefix_cache": _LEADER,
    "sliding_window_extra": Rule(Where.RANK, applies=_has_windows),
    "host": _nowhere(_HTTP),
    "port": _nowhere(_HTTP),
    "api_key_set": _nowhere(_HTTP),
    "stall_timeout": _RANK,
    "evidence": _nowhere("decides whether the ranks are started at all"),
    "log_format": _nowhere("every line that is written shows it"),
    "drain_timeout": _nowhere(_HTTP),
    "tool_call_parser": _nowhere(_HTTP),
    "reasoning_parser": _nowhere(_HTTP),
    "cors_origins": _nowhere(_HTTP),
    "max_waiting_requests": _nowhere(_HTTP),
    "request_timeout": _nowhere(_HTTP),
    "max_request_bytes": _nowhere(_HTTP),
    "disaggregation_mode": _LEADER,
    "disaggregation_transfer_backend": Rule(Where.RANK, applies=_is_disaggregated),
    "disaggregation_bootstrap_port": Rule(
        Where.LEADER, applies=lambda plan: plan.disaggregation_mode == "prefill"
    ),
    "disaggregation_timeout": Rule(Where.LEADER, applies=_is_disaggregated),
    "disaggregation_queue_timeout": Rule(Where.LEADER, applies=_is_disaggregated),
    "otlp_endpoint": _nowhere("acts in the HTTP front end only, where the collector sees it"),
    "log_level": _nowhere("it decides what is written, which is its own receipt"),
    "memory": _nowhere("an estimate; the pages and buffer bytes it is made of have receipts"),
    "provenance": _nowhere("says who decided, which nothing acts on"),
}

LAYER_RULES: Final[Mapping[str, Rule]] = {
    "prefill dispatches": _calls("dispatches", "prefill"),
    "prefill combines": _calls("combines", "prefill"),
    "decode dispatches": _calls("dispatches", "decode"),
    "decode combines": _calls("combines", "decode"),
    "expert dtype": Rule(
        Where.LAYER, expected=lambda plan, rank: plan.dtype, applies=_has_experts, path=("dtype",)
    ),
}
"""What every layer must show beside the plan items: calls in the warm-up, in the plan's dtype. A layer
that was built without its dispatcher shows neither."""

DETAILS: Final = frozenset({"moe_layers", "moe_dispatcher", "attention", "start"})
"""Entries of a rank's receipts that hold details instead of one item."""


def check(plan: LaunchPlan, receipts: Observed) -> list[Mismatch]:
    """Every item of ``plan`` that some rank did not observe, or observed differently; [] is proof.

    Entries that no rule knows are mismatches too, since nothing says what they should be.
    """
    found: list[Mismatch] = []
    for item, rule in {**RULES, **LAYER_RULES}.items():
        if rule.where is Where.NOWHERE or not rule.applies(plan):
            continue
        for rank in _ranks(plan, rule.where):
            found += _compare(plan, item, rule, rank, receipts.get(rank, {}))
    return found + list(_strangers(plan, receipts))


def option_of(item: str) -> str:
    """The flag that sets a plan item; where only rules set it, the flag whose meaning it belongs to."""
    flags = [option.flag for option in OPTIONS.values() if item in option.items]
    if flags:
        return flags[0]
    if item == "expert dtype":
        return "--dtype"
    if item == "nccl_library":
        return "--ranks-per-gpu"
    return "--moe-a2a-backend" if item.startswith("moe_") or item in LAYER_RULES else item


def _ranks(plan: LaunchPlan, where: Where) -> range:
    return range(0, plan.tp_size, plan.attn_tp_size if where is Where.LEADER else 1)


def _compare(
    plan: LaunchPlan, item: str, rule: Rule, rank: int, receipt: Mapping[str, object]
) -> Iterator[Mismatch]:
    expected = rule.expected(plan, rank) if rule.expected else getattr(plan, item)

    def mismatch(layer: int | None, value: object) -> Mismatch:
        return Mismatch(item, option_of(item), rank, layer, expected, value)

    if rule.where is not Where.LAYER:
        observed = receipt.get(item)
        if observed is None or not rule.agrees(expected, observed):
            yield mismatch(None, observed)
        return
    layers = _layers(receipt)
    wanted = {index for index, layer in enumerate(plan.card.layers) if layer.is_moe}
    for index in sorted(wanted | layers.keys()):
        value = _dig(layers.get(index), rule.path)
        if index not in wanted:
            yield Mismatch(item, option_of(item), rank, index, "no MoE layer there", value)
        elif value is None or not rule.agrees(expected, value):
            yield mismatch(index, value)


def _layers(receipt: Mapping[str, object]) -> dict[int, object]:
    """Layer index -> that layer's receipt."""
    entries = receipt.get("moe_layers")
    if not isinstance(entries, list | tuple):
        return {}
    return {entry["layer"]: entry for entry in entries if isinstance(entry, Mapping) and "layer" in entry}


def _dig(entry: object, path: tuple[str, ...]) -> object:
    for key in path:
        if not isinstance(entry, Mapping):
            return None
        entry = entry.get(key)
    return entry


def _strangers(plan: LaunchPlan, receipts: Observed) -> Iterator[Mismatch]:
    for rank, items in receipts.items():
        if not 0 <= rank < plan.tp_size:
            yield Mismatch("tp_size", option_of("tp_size"), rank, None, plan.tp_size, f"a rank {rank}")
        for item in items.keys() - RULES.keys() - DETAILS:
            yield Mismatch(item, item, rank, None, "nothing of that name", items[item])
