"""The plan for people: every item with who set it and why, a memory table, token capacities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from interlock.plan.device import FP8_CACHE, FP8_CACHE_SCALE
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.memory import size
from interlock.plan.receipts import RULES, Mismatch, Where
from interlock.plan.rehearsal import notice

if TYPE_CHECKING:
    from rich.console import RenderableType

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": (
        "model",
        "model_path",
        "model_family",
        "served_model_name",
        "load_format",
        "qkv_layout",
        "sliding_window_extra",
        "dtype",
        "kv_cache_dtype",
        "attention_weight_format",
        "mlp_weight_format",
        "expert_weight_format",
        "num_hidden_layers",
        "deterministic",
        "seed",
    ),
    "Machine": ("device", "kernels", "attention_backend", "threads"),
    "Ranks": (
        "tp_size",
        "ep_size",
        "attn_dp_size",
        "nnodes",
        "node_rank",
        "dist_init",
        "ranks_per_gpu",
        "nccl_library",
        "stall_timeout",
    ),
    "Experts": (
        "moe_a2a_backend",
        "moe_a2a_mode",
        "moe_runner_backend",
        "moe_layout_prefill",
        "moe_layout_decode",
        "moe_overlap",
        "moe_prefill_capacity",
        "moe_decode_capacity",
        "moe_buffer_bytes",
    ),
    "Batching": (
        "max_model_len",
        "max_running_requests",
        "chunked_prefill_size",
        "page_size",
        "full_pages",
        "window_pages",
        "prefix_cache",
        "cuda_graph_sizes",
        "overlap_schedule",
    ),
    "Disaggregation": (
        "disaggregation_mode",
        "disaggregation_transfer_backend",
        "disaggregation_bootstrap_port",
        "disaggregation_timeout",
        "disaggregation_queue_timeout",
    ),
    "Server": (
        "host",
        "port",
        "api_key_set",
        "evidence",
        "log_level",
        "log_format",
        "drain_timeout",
        "otlp_endpoint",
        "tool_call_parser",
        "reasoning_parser",
        "cors_origins",
        "max_waiting_requests",
        "request_timeout",
        "max_request_bytes",
    ),
}
"""Items by group. ``card``, ``memory`` and ``provenance`` are shown in their own way."""

_STYLES: Final = {
    Source.USER: "bold cyan",
    Source.RULE: "yellow",
    Source.LAUNCHER: "magenta",
    Source.MODEL: "green",
    Source.DEFAULT: "dim",
}


def item_text(plan: LaunchPlan, item: str) -> str:
    """One item's value as people write it."""
    value = getattr(plan, item)
    if item == "moe_buffer_bytes":
        return size(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "-"


def summary(plan: LaunchPlan) -> str:
    """The plan in a few lines, as ``serve`` prints it; what the user or a rule set is named."""
    memory = plan.memory
    lines = [
        f"{plan.model} ({plan.card.architecture}, {_count(plan.card.parameters)} weights in {plan.dtype}) "
        f"on {plan.device}, kernels {plan.kernels}",
        f"ranks: tp {plan.tp_size}, ep {plan.ep_size}, attention {plan.attn_dp_size} x tp "
        f"{plan.attn_tp_size}; {plan.threads} threads each",
        f"experts: a2a {plan.moe_a2a_backend}, runner {plan.moe_runner_backend}, "
        f"T {plan.moe_prefill_capacity} prefill / {plan.moe_decode_capacity} decode",
        f"memory of a rank: {size(memory.total)} of {size(memory.available)} "
        f"(weights {size(memory.weights)}, KV {size(memory.kv_full + memory.kv_window)})",
        "room: " + ", ".join(f"{name} {value}" for name, value, _ in capacities(plan)),
    ]
    if plan.ranks_per_gpu > 1:
        lines.append(notice(plan))
    if plan.kv_cache_dtype == FP8_CACHE:
        lines.append(f"warning: keys and values are cached as {FP8_CACHE}; {FP8_CACHE_SCALE}")
    return "\n".join(lines)


def capacities(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    """(what, how many tokens or requests, for what) that fit at once."""
    rows = [
        ("longest request", f"{plan.max_model_len} tokens", "prompt plus answer"),
        ("running requests", str(plan.max_running_requests), "for each attention replica"),
        ("prefill step", f"{plan.chunked_prefill_size} tokens", "for each attention replica"),
    ]
    if plan.full_pages:
        rows.append(("full KV", f"{plan.full_pages * plan.page_size} tokens", "for each attention replica"))
    if plan.window_pages:
        rows.append(
            ("window KV", f"{plan.window_pages * plan.page_size} tokens", "for each attention replica")
        )
    rows.append(("T prefill", f"{plan.moe_prefill_capacity} tokens", "dispatched by one rank in one step"))
    rows.append(("T decode", f"{plan.moe_decode_capacity} tokens", "dispatched by one rank in one step"))
    if plan.attn_dp_size > 1:
        total = plan.max_running_requests * plan.attn_dp_size
        rows.append(("running requests in all", str(total), f"over {plan.attn_dp_size} attention replicas"))
    return rows


def memory_rows(plan: LaunchPlan) -> list[tuple[str, int]]:
    """(part, bytes) of the largest rank, with their sum and what is left."""
    memory = plan.memory
    return [
        ("weights", memory.weights),
        ("KV, full attention", memory.kv_full),
        ("KV, sliding window", memory.kv_window),
        ("a2a buffers", memory.a2a_buffers),
        ("activations", memory.activations),
        *([("CUDA graphs", memory.graphs)] if memory.graphs else []),
        ("together", memory.total),
        ("available", memory.available),
    ]


def explain(plan: LaunchPlan, groups: Sequence[str] = tuple(GROUPS)) -> RenderableType:
    """Tables of items (those of ``groups``), memory and capacities for a terminal."""
    from rich.columns import Columns
    from rich.console import Group

    return Group(
        _items_table(plan, groups), Columns([_memory_table(plan), _capacity_table(plan)], padding=(0, 4))
    )


def explain_receipts(
    plan: LaunchPlan, receipts: Mapping[int, Mapping[str, object]], mismatches: Sequence[Mismatch]
) -> RenderableType:
    """Both sides of every item: what was planned, what was observed, and where they differ."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    wrong = {mismatch.item for mismatch in mismatches}
    table = Table(title="Plan and receipts", title_justify="left", box=None, header_style="bold")
    for column in ("item", "planned", "observed", ""):
        table.add_column(column, overflow="fold")
    for item, rule in RULES.items():
        if item in ("card", "memory", "provenance"):
            continue
        observed = rule.reason if rule.where is Where.NOWHERE else observed_text(item, receipts)
        verdict = "differs" if item in wrong else "" if rule.where is Where.NOWHERE else "agrees"
        style = "bold red" if item in wrong else "dim" if rule.where is Where.NOWHERE else ""
        table.add_row(item, item_text(plan, item), observed, verdict, style=style)
    lines = [Text(str(mismatch), style="red") for mismatch in mismatches]
    return Group(table, *(lines or [Text("every receipt agrees with the plan", style="green")]))


def observed_text(item: str, receipts: Mapping[int, Mapping[str, object]]) -> str:
    """One item as the ranks observed it: the common value, or rank by rank where they differ."""
    values = {rank: items[item] for rank, items in sorted(receipts.items()) if item in items}
    if not values:
        return "-"
    if len(set(map(str, values.values()))) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{value} (rank {rank})" for rank, value in values.items())


def _items_table(plan: LaunchPlan, groups: Sequence[str]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("item", "value", "set by", "why"):
        table.add_column(column, overflow="fold")
    for group in groups:
        table.add_row(f"[bold]{group}[/bold]")
        for item in GROUPS[group]:
            given = plan.provenance[item]
            table.add_row(
                f"  {item}",
                _escape(item_text(plan, item)),
                str(given.source.value),
                _escape(given.reason),
                style=_STYLES[given.source],
            )
    return table


def _memory_table(plan: LaunchPlan) -> RenderableType:
    from rich.table import Table

    table = Table(title="Memory of a rank", title_justify="left", box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in memory_rows(plan):
        table.add_row(name, size(count), style="bold" if name == "together" else "")
    return table


def _capacity_table(plan: LaunchPlan) -> RenderableType:
    from rich.table import Table

    table = Table(title="What fits at once", title_justify="left", box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in capacities(plan):
        table.add_row(*row)
    return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _count(parameters: int) -> str:
    """``309_000_000_000`` -> ``"309B"``."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= factor:
            return f"{parameters / factor:.4g}{unit}"
    return str(parameters)
