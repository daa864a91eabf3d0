"""Bytes that the a2a backend reserves, by its own formula."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.moe.terms import Phase
from interlock.plan.capacity import Limits
from interlock.plan.card import ModelCard
from interlock.plan.moe import Experts

if TYPE_CHECKING:
    from interlock.moe.a2a.base import A2ABackend


def buffer_bytes(
    backend: A2ABackend, card: ModelCard, experts: Experts, limits: Limits, sources: int, dtype_bytes: int
) -> int:
    """What one rank reserves; 0 in a model without experts.

    ``sources``: ranks whose distinct tokens reach this one: its EP group, or the attention replicas where
    nothing is exchanged and every rank of a replica holds the same tokens.
    """
    from interlock.moe.a2a.base import BufferShape

    if card.experts is None:
        return 0
    row = card.hidden_size * dtype_bytes
    shape = BufferShape(
        ranks=sources,
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
    )
    return backend.buffer_bytes(shape)
