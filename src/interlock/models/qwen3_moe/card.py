"""config.json of Qwen3-MoE -> ModelCard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from interlock.errors import CheckpointError
from interlock.models.config_fields import (
    ConfigFields,
    config_hash,
    fp8_block,
    fp8_exceptions,
    rope_parameters,
)
from interlock.models.decoder_weights import count_decoder_parameters
from interlock.plan.card import AttentionCard, ExpertsCard, LayerCard, ModelCard

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "num_experts|num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "rope_theta|rope_parameters",
    "dtype|torch_dtype",
)
OPTIONAL = (
    "intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "attention_bias",
    "use_sliding_window",
    "rope_scaling",
    "hidden_act",
    "tie_word_embeddings",
    "quantization_config",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def read_card(config: Mapping[str, Any]) -> ModelCard:
    """Raises CheckpointError for missing or misspelt keys and for features that are not implemented."""
    fields = ConfigFields(config, required=REQUIRED, optional=OPTIONAL)
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("attention_bias", (False,), False)
    fields.choice("use_sliding_window", (False,), False)
    if fields.has("rope_scaling"):
        rope_parameters(fields.mapping("rope_scaling"), "rope_scaling")
    block = fp8_block(fields)
    dtype = fields.dtype()
    sparse = _sparse_layers(fields)
    attention = _attention(fields)
    card = ModelCard(
        family="qwen3_moe",
        architecture=config["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size") if not all(sparse) else 0,
        layers=tuple(LayerCard(attention=attention, is_moe=is_moe) for is_moe in sparse),
        experts=_experts(fields) if any(sparse) else None,
        norm_eps=fields.number("rms_norm_eps"),
        max_position=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=dtype,
        weight_format="fp8_block" if block else dtype,
        weight_block=block or (128, 128),
        fp8_except=fp8_exceptions(fields),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        config_hash=config_hash(config),
    )
    return msgspec.structs.replace(card, parameters=count_decoder_parameters(card))


def _sparse_layers(fields: ConfigFields) -> list[bool]:
    """A layer has experts when it is not listed in mlp_only_layers and (i + 1) % decoder_sparse_step == 0."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.token_ids("mlp_only_layers"))
    return [
        index not in dense and (index + 1) % step == 0 for index in range(fields.integer("num_hidden_layers"))
    ]


def _attention(fields: ConfigFields) -> AttentionCard:
    parameters = rope_parameters(fields.mapping("rope_parameters"), "rope_parameters")
    thetas = {fields.number("rope_theta")} if fields.has("rope_theta") else set()
    if "rope_theta" in parameters:
        thetas.add(float(parameters["rope_theta"]))
    if len(thetas) != 1:
        raise CheckpointError(
            "config.json: rope_theta is missing"
            if not thetas
            else f"config.json: rope_theta and rope_parameters disagree: {sorted(thetas)}"
        )
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    head_dim = fields.integer("head_dim")
    return AttentionCard(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope_theta=thetas.pop(),
        rotary_dim=head_dim,
        has_qk_norm=True,
    )


def _experts(fields: ConfigFields) -> ExpertsCard:
    """``norm_topk_prob`` absent means False, this family's default."""
    num_experts = fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok = {top_k} is more than num_experts = {num_experts}"
        )
    return ExpertsCard(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("moe_intermediate_size"),
        scoring="softmax",
        normalise_top_k=fields.flag("norm_topk_prob", False),
    )
