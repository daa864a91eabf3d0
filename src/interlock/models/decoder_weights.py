"""Tensor names that the decoder families of the Hugging Face hub share. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from interlock.checkpoint.specs import TensorSpec, count_parameters
from interlock.plan.card import AttentionCard, LayerCard, ModelCard

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """How names of a layer's tensors begin."""
    return f"model.layers.{layer}."


def decoder_specs(card: ModelCard) -> Iterator[TensorSpec]:
    """Every tensor of a pre-norm decoder with SwiGLU MLPs or routed experts."""
    yield from outer_specs(card)
    for index, layer in enumerate(card.layers):
        yield from layer_specs(index, layer, card)


def count_decoder_parameters(card: ModelCard) -> int:
    """Number of weights; layers of the same kind are counted once and multiplied."""
    layers = Counter(card.layers)
    inner = sum(count_parameters(layer_specs(0, layer, card)) * count for layer, count in layers.items())
    return count_parameters(outer_specs(card)) + inner


def outer_specs(card: ModelCard) -> Iterator[TensorSpec]:
    """Embedding, final norm and head."""
    vocab, hidden = card.vocab_size, card.hidden_size
    yield TensorSpec(EMBEDDING, (vocab, hidden), role="embedding")
    yield TensorSpec(FINAL_NORM, (hidden,), role="norm")
    yield TensorSpec(HEAD, (vocab, hidden), optional=card.tie_word_embeddings)


def layer_specs(index: int, layer: LayerCard, card: ModelCard) -> Iterator[TensorSpec]:
    """Tensors of one layer."""
    prefix, hidden = layer_prefix(index), card.hidden_size
    yield TensorSpec(prefix + "input_layernorm.weight", (hidden,), role="norm")
    yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), role="norm")
    yield from attention_specs(prefix + "self_attn.", layer.attention, card, card_chunks(card))
    if layer.is_moe:
        yield from experts_specs(prefix + "mlp.", card)
    else:
        yield from swiglu_specs(prefix + "mlp.", hidden, card.intermediate_size)


def card_chunks(card: ModelCard) -> int:
    """Chunks of a fused qkv tensor: the kv heads of a full-attention layer, also in sliding-window layers."""
    full = [layer.attention for layer in card.layers if layer.attention.window is None]
    attention = full[0] if full else card.layers[0].attention
    return attention.num_kv_heads


def attention_specs(
    prefix: str, attention: AttentionCard, card: ModelCard, chunks: int
) -> Iterator[TensorSpec]:
    """Tensors of one attention: q, k, v apart or fused in ``chunks``; o, sinks and norms as the card says."""
    hidden = card.hidden_size
    q = attention.num_heads * attention.head_dim
    k = attention.num_kv_heads * attention.head_dim
    v = attention.num_kv_heads * attention.v_head_dim
    if card.fused_qkv:
        yield TensorSpec(
            prefix + "qkv_proj.weight", (q + k + v, hidden), quantisable=True, fused_groups=chunks
        )
    else:
        for name, rows in (("q", q), ("k", k), ("v", v)):
            yield TensorSpec(f"{prefix}{name}_proj.weight", (rows, hidden), quantisable=True)
    yield TensorSpec(
        prefix + "o_proj.weight",
        (hidden, attention.num_heads * attention.v_head_dim),
        role="output",
        quantisable=True,
    )
    if attention.has_qk_norm:
        yield TensorSpec(prefix + "q_norm.weight", (attention.head_dim,), role="norm")
        yield TensorSpec(prefix + "k_norm.weight", (attention.head_dim,), role="norm")
    if attention.has_sink:
        yield TensorSpec(prefix + "attention_sink_bias", (attention.num_heads,), role="bias")


def swiglu_specs(prefix: str, hidden: int, intermediate: int) -> Iterator[TensorSpec]:
    """gate and up [intermediate, hidden], down [hidden, intermediate]."""
    for name in ("gate", "up"):
        yield TensorSpec(f"{prefix}{name}_proj.weight", (intermediate, hidden), quantisable=True)
    yield TensorSpec(prefix + "down_proj.weight", (hidden, intermediate), role="output", quantisable=True)


def experts_specs(prefix: str, card: ModelCard) -> Iterator[TensorSpec]:
    """The router [experts, hidden], its bias, and every expert's three projections."""
    experts = card.experts
    assert experts is not None, "a MoE layer needs an ExpertsCard"
    yield TensorSpec(prefix + "gate.weight", (experts.num_experts, card.hidden_size), role="router")
    if experts.has_selection_bias:
        yield TensorSpec(prefix + "gate.e_score_correction_bias", (experts.num_experts,), role="bias")
    for expert in range(experts.num_experts):
        yield from swiglu_specs(f"{prefix}experts.{expert}.", card.hidden_size, experts.intermediate_size)
