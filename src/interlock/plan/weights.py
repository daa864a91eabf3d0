"""Bytes of a rank's weights and of the rows that flow through its layers, from the model card.

Formulas count tensor elements: h hidden, V vocabulary, nh/kvh heads, hd/vd head sizes, I dense width,
E experts of width i, k experts a token, n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from interlock.plan.card import AttentionCard, ModelCard

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "fp8_e4m3": 1}
FLOAT32: Final = 4


@dataclass(frozen=True, slots=True)
class Slices:
    """Over how many ranks each part is sliced, and in what its elements are held (bytes).

    ``expert_bytes``, ``attention_bytes`` and ``mlp_bytes`` may be fractional: an fp8 block carries a float32
    scale. The last two are None where these weights are held in the dtype.
    """

    attn_tp: int
    ep: int
    experts_tp: int
    dtype_bytes: int
    expert_bytes: float
    attention_bytes: float | None = None
    mlp_bytes: float | None = None


def element_bytes(weight_format: str) -> float:
    """Bytes of one weight in memory: of a dtype, or of e4m3 with a float32 scale for each 128x128 block."""
    return 1 + FLOAT32 / 128**2 if weight_format == "fp8_block" else DTYPE_BYTES[weight_format]


def local_kv_heads(attention: AttentionCard, attn_tp: int) -> int:
    """Key-value heads on one rank; copied when there are more ranks than heads."""
    return max(1, attention.num_kv_heads // attn_tp)


def weight_bytes(card: ModelCard, slices: Slices) -> int:
    """Weights of the largest rank."""
    hidden, size = card.hidden_size, slices.dtype_bytes
    vocabulary = -(-card.vocab_size // slices.attn_tp) * hidden * size
    total = 2 * vocabulary + hidden * size
    for layer in card.layers:
        total += _attention_bytes(layer.attention, card, slices) + 2 * hidden * size
        total += _experts_bytes(card, slices) if layer.is_moe else _dense_bytes(card, slices)
    return total


def _attention_bytes(attention: AttentionCard, card: ModelCard, slices: Slices) -> int:
    heads, kv_heads = attention.num_heads // slices.attn_tp, local_kv_heads(attention, slices.attn_tp)
    rows = heads * attention.head_dim + kv_heads * (attention.head_dim + attention.v_head_dim)
    output = heads * attention.v_head_dim
    sinks = attention.num_heads * FLOAT32 if attention.has_sink else 0
    size: float = slices.dtype_bytes if slices.attention_bytes is None else slices.attention_bytes
    output_size: float = slices.dtype_bytes if "o_proj" in card.fp8_except else size
    return int((rows * size + output * output_size) * card.hidden_size) + sinks


def _dense_bytes(card: ModelCard, slices: Slices) -> int:
    size: float = slices.dtype_bytes if slices.mlp_bytes is None else slices.mlp_bytes
    return int(3 * card.hidden_size * -(-card.intermediate_size // slices.attn_tp) * size)


def _experts_bytes(card: ModelCard, slices: Slices) -> int:
    experts = card.experts
    assert experts is not None
    router = experts.num_experts * (card.hidden_size + 1) * FLOAT32
    local = experts.num_experts // slices.ep
    elements = 3 * card.hidden_size * (experts.intermediate_size // slices.experts_tp)
    return router + int(local * elements * slices.expert_bytes)


def activation_bytes(
    card: ModelCard, slices: Slices, *, tokens: int, moe_tokens: int, logit_rows: int
) -> int:
    """Peak bytes of the tensors that live during one step.

    Args:
        tokens: of this rank's replica in the largest step.
        moe_tokens: tokens whose experts this rank may compute (of all ranks, where no exchange happens).
        logit_rows: rows of float32 logits, gathered over the vocabulary, with one copy for sampling.
    """
    hidden, size = card.hidden_size, slices.dtype_bytes
    stream = 3 * tokens * hidden * size
    widest = max(_attention_row(layer.attention, slices) for layer in card.layers)
    layer_rows = [tokens * (widest + hidden) * size]
    if any(not layer.is_moe for layer in card.layers):
        layer_rows.append(tokens * (3 * -(-card.intermediate_size // slices.attn_tp) + hidden) * size)
    if card.experts is not None:
        width = 3 * card.experts.intermediate_size // slices.experts_tp
        layer_rows.append(moe_tokens * (card.experts.top_k * (width + hidden) + hidden) * size)
    logits = 2 * logit_rows * card.vocab_size * FLOAT32
    return stream + max(*layer_rows, logits)


def graph_bytes(card: ModelCard, slices: Slices, sizes: Sequence[int]) -> int:
    """Bytes that captured decode steps keep: one step of the largest, hidden rows and logits of each."""
    if not sizes:
        return 0
    largest = max(sizes)
    step = activation_bytes(card, slices, tokens=largest, moe_tokens=largest, logit_rows=largest)
    return step + sum(sizes) * (card.vocab_size * FLOAT32 + card.hidden_size * slices.dtype_bytes)


def _attention_row(attention: AttentionCard, slices: Slices) -> int:
    heads, kv_heads = attention.num_heads // slices.attn_tp, local_kv_heads(attention, slices.attn_tp)
    q_and_out = heads * (2 * attention.head_dim + attention.v_head_dim)
    return q_and_out + kv_heads * (attention.head_dim + attention.v_head_dim)


def kv_bytes_per_token(card: ModelCard, attn_tp: int, kv_bytes: int, *, window: bool) -> int:
    """Bytes of one token's keys and values in all layers of one page space, on one rank."""
    return kv_bytes * sum(
        local_kv_heads(layer.attention, attn_tp) * (layer.attention.head_dim + layer.attention.v_head_dim)
        for layer in card.layers
        if (layer.attention.window is not None) is window
    )
