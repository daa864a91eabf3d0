"""Whether the nodes of a launch were asked for the same: each plans on its own, and node 0's plan counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from interlock.errors import StartupError
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.receipts import option_of

OWN: Final = frozenset(
    {"node_rank", "host", "port", "api_key_set", "evidence", "log_level", "served_model_name", "model"}
    | {"provenance", "memory", "card", "log_format", "drain_timeout", "otlp_endpoint"}
    | {
        "tool_call_parser",
        "reasoning_parser",
        "cors_origins",
        "max_waiting_requests",
        "request_timeout",
        "max_request_bytes",
    }
)
"""Items that may differ between nodes, or are compared in their own way."""

SIZED_BY_MACHINE: Final = frozenset(
    {"threads", "full_pages", "window_pages", "max_model_len", "max_running_requests"}
    | {"chunked_prefill_size", "moe_prefill_capacity", "moe_decode_capacity", "moe_buffer_bytes"}
)
"""Items that rules derive from a machine's memory and cores: node 0's hold, unless the user set them here."""


def refuse_other_launch(mine: LaunchPlan, first: LaunchPlan) -> None:
    """Compare the plan that this node made with that of node 0, by which all ranks are built.

    Raises:
        StartupError: the nodes were given different options or checkpoints, or this one is too small.
    """
    where = f"node {mine.node_rank}"
    for item in _differing(mine, first):
        raise StartupError(
            f"{option_of(item)}: {where} has {item} = {getattr(mine, item)}, and node 0 has "
            f"{getattr(first, item)}; give every node the same options"
        )
    if mine.card != first.card:
        raise StartupError(f"MODEL: the config.json of {where} differs from that of node 0")
    if first.memory.total > mine.memory.available:
        raise StartupError(
            f"--kv-memory: by the plan of node 0 a rank holds {first.memory.total} bytes, and {where} has "
            f"{mine.memory.available} for each; give every node a smaller --kv-memory"
        )


def _by_user(plan: LaunchPlan, item: str) -> bool:
    provenance = plan.provenance.get(item)
    return provenance is not None and provenance.source is Source.USER


def _differing(mine: LaunchPlan, first: LaunchPlan) -> Iterator[str]:
    for field in msgspec.structs.fields(LaunchPlan):
        item = field.name
        if item in OWN or getattr(mine, item) == getattr(first, item):
            continue
        if item not in SIZED_BY_MACHINE or _by_user(mine, item):
            yield item
