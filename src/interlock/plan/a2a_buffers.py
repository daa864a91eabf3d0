"""Bytes that the a2a backend reserves, by its own formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from interlock.moe.terms import Phase
from interlock.plan.capacity import Limits
from interlock.plan.card import ModelCard
from interlock.plan.moe import Experts

if TYPE_CHECKING:
    from interlock.moe.a2a.backend import A2ABackend


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who exchanges rows with a rank, and how.

    Attributes:
        sources: ranks whose distinct tokens reach it: its EP group, or the attention replicas where nothing
            is exchanged and every rank of a replica holds the same tokens.
        nodes: machines that they are spread over. mode: of the backend.
        alignment: that the runner wants of expert segments.
        halves: steps are exchanged in two halves, each with buffers of its own.
    """

    sources: int
    nodes: int = 1
    mode: str = ""
    alignment: int = 1
    halves: bool = False


def buffer_bytes(
    backend: A2ABackend,
    card: ModelCard,
    experts: Experts,
    limits: Limits,
    exchange: Exchange,
    dtype_bytes: int,
) -> int:
    """What one rank reserves; 0 in a model without experts."""
    from interlock.moe.a2a.backend import BufferShape

    if card.experts is None:
        return 0
    row = card.hidden_size * dtype_bytes
    shape = BufferShape(
        ranks=exchange.sources,
        num_experts=card.experts.num_experts,
        top_k=card.experts.top_k,
        hidden_size=card.hidden_size,
        row_bytes=row,
        scale_bytes=0,
        result_bytes=row,
        capacity={
            Phase.PREFILL: limits.prefill_capacity.value,
            Phase.DECODE: limits.decode_capacity.value,
        },
        layouts={
            Phase.PREFILL: experts.layout_prefill.value,
            Phase.DECODE: experts.layout_decode.value,
        },
        alignment=exchange.alignment,
        nodes=exchange.nodes,
        mode=exchange.mode,
    )
    if not exchange.halves:
        return backend.buffer_bytes(shape)
    larger = {phase: -(-tokens // 2) for phase, tokens in shape.capacity.items()}
    smaller = {phase: tokens // 2 for phase, tokens in shape.capacity.items()}
    return sum(backend.buffer_bytes(replace(shape, capacity=part)) for part in (larger, smaller))
