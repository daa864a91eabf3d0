"""config.json of the MiMo-V2 family -> ModelCard.

Two spellings exist. The hub's (all releases) has ``hybrid_layer_pattern``, ``moe_layer_freq``, ``rope_theta``
and ``swa_*`` keys; the one that transformers writes for its own ``mimo_v2_flash`` class has ``layer_types``,
``mlp_layer_types`` and nested ``rope_parameters``. A file may hold both (then they must agree).
"""

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
    "v_head_dim",
    "max_position_embeddings",
    "layernorm_epsilon|rms_norm_eps",
    "hybrid_layer_pattern|layer_types",
    "moe_layer_freq|mlp_layer_types",
    "partial_rotary_factor|rope_parameters",
    "rope_theta|rope_parameters",
    "dtype|torch_dtype",
)
OPTIONAL = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "attention_value_scale",
    "attention_projection_layout",
    "attention_bias",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
    "sliding_window",
    "sliding_window_size",
    "swa_rope_theta",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "rope_scaling",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "scoring_func",
    "topk_method",
    "n_shared_experts",
    "routed_scaling_factor",
    "moe_router_dtype",
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
    _refuse_unsupported(fields)
    block = fp8_block(fields)
    dtype = fields.dtype()
    sliding = _layer_kinds(fields, "hybrid_layer_pattern", {0: False, 1: True}, "layer_types")
    sparse = _layer_kinds(fields, "moe_layer_freq", {0: False, 1: True}, "mlp_layer_types")
    full_attention = _attention(fields, sliding=False)
    window_attention = _attention(fields, sliding=True) if any(sliding) else full_attention
    fused = fields.choice("attention_projection_layout", {"fused_qkv": True, "split": False}, "split")
    card = ModelCard(
        family="mimo_v2",
        architecture=config["architectures"][0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size") if not all(sparse) else 0,
        layers=tuple(
            LayerCard(attention=window_attention if window else full_attention, is_moe=moe)
            for window, moe in zip(sliding, sparse, strict=True)
        ),
        experts=_experts(fields) if any(sparse) else None,
        norm_eps=fields.number("layernorm_epsilon" if fields.has("layernorm_epsilon") else "rms_norm_eps"),
        max_position=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=dtype,
        weight_format="fp8_block" if block else dtype,
        weight_block=block or (128, 128),
        fp8_except=fp8_exceptions(fields),
        fused_qkv=fused,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        pad_token_id=fields.token_id("pad_token_id"),
        config_hash=config_hash(config),
    )
    return msgspec.structs.replace(card, parameters=count_decoder_parameters(card))


def _refuse_unsupported(fields: ConfigFields) -> None:
    fields.choice("hidden_act", ("silu",), "silu")
    fields.choice("attention_bias", (False,), False)
    fields.choice("n_shared_experts", (0,), 0)
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if fields.has("rope_scaling"):
        rope_parameters(fields.mapping("rope_scaling"), "rope_scaling")


def _layer_kinds(
    fields: ConfigFields, hub_key: str, kinds: Mapping[Any, bool], native_key: str
) -> list[bool]:
    """One flag a layer from the hub's list of 0 and 1 or transformers' list of names."""
    names = {"full_attention": False, "sliding_attention": True, "dense": False, "sparse": True}
    found = []
    for key, meaning in ((hub_key, kinds), (native_key, names)):
        if not fields.has(key):
            continue
        values = fields.sequence(key, fields.integer("num_hidden_layers"))
        unknown = [value for value in values if value not in meaning]
        if unknown:
            raise CheckpointError(
                f"config.json: {key} holds {unknown[0]!r}; supported: {', '.join(map(repr, meaning))}"
            )
        found.append([meaning[value] for value in values])
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(f"config.json: {hub_key} and {native_key} describe different layers")
    return found[0]


def _attention(fields: ConfigFields, *, sliding: bool) -> AttentionCard:
    native = not fields.has("hybrid_layer_pattern")
    prefix = "swa_" if sliding else ""
    kv_default = 2 * fields.integer("num_key_value_heads") if sliding and native else None
    if sliding and not native and not fields.has("swa_num_key_value_heads"):
        raise CheckpointError("config.json: required key 'swa_num_key_value_heads' is missing")
    num_heads = fields.integer(prefix + "num_attention_heads", fields.integer("num_attention_heads"))
    num_kv_heads = fields.integer(prefix + "num_key_value_heads", kv_default)
    head_dim = fields.integer(prefix + "head_dim", fields.integer("head_dim"))
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: {prefix}num_attention_heads = {num_heads} is not a multiple of "
            f"{prefix}num_key_value_heads = {num_kv_heads}"
        )
    theta, rotary_dim = _rope(fields, head_dim, sliding=sliding)
    return AttentionCard(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=fields.integer(prefix + "v_head_dim", fields.integer("v_head_dim")),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        window=_window(fields) if sliding else None,
        value_scale=fields.number("attention_value_scale", 1.0),
        has_sink=_has_sink(fields, native=native, sliding=sliding),
    )


def _has_sink(fields: ConfigFields, *, native: bool, sliding: bool) -> bool:
    kind = "swa" if sliding else "full"
    key = f"add_{kind}_attention_sink_bias"
    if native:
        return fields.flag(key, sliding)
    return fields.flag(key)


def _rope(fields: ConfigFields, head_dim: int, *, sliding: bool) -> tuple[float, int]:
    """(base, rotated channels) of a kind of layer: int(head_dim * partial_rotary_factor), e.g. 64 of 192."""
    parameters = fields.mapping("rope_parameters")
    kind = "sliding_attention" if sliding else "full_attention"
    nested = kind in parameters
    parameters = rope_parameters(parameters[kind] if nested else parameters, "rope_parameters")
    theta_key = "swa_rope_theta" if sliding else "rope_theta"
    thetas = {fields.number(theta_key)} if fields.has(theta_key) else set()
    if "rope_theta" in parameters and (nested or not sliding):
        thetas.add(float(parameters["rope_theta"]))
    factors = {fields.number("partial_rotary_factor")} if fields.has("partial_rotary_factor") else set()
    if "partial_rotary_factor" in parameters:
        factors.add(float(parameters["partial_rotary_factor"]))
    for key, values in ((theta_key, thetas), ("partial_rotary_factor", factors)):
        if not values:
            raise CheckpointError(
                f"config.json: required key {key!r} is missing (top level or rope_parameters of {kind})"
            )
        if len(values) > 1:
            raise CheckpointError(
                f"config.json: {key} and rope_parameters of {kind} layers disagree: {sorted(values)}"
            )
    rotary_dim = int(head_dim * factors.pop())
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor rotates {rotary_dim} of {head_dim} channels; "
            "the number must be even, positive and at most head_dim"
        )
    return thetas.pop(), rotary_dim


def _window(fields: ConfigFields) -> int:
    """Visible keys including the token itself, as the file says it.

    The hub's files give the same number twice; transformers rewrites ``sliding_window`` to
    ``sliding_window_size + 1`` when it saves such a file again, and then ``sliding_window_size`` is the
    number of the release. A file with ``sliding_window`` alone is taken at its word.
    """
    if not fields.has("sliding_window_size"):
        return fields.integer("sliding_window")
    size = fields.integer("sliding_window_size")
    if fields.has("sliding_window") and fields.integer("sliding_window") not in (size, size + 1):
        raise CheckpointError(
            f"config.json: sliding_window = {fields.integer('sliding_window')} and "
            f"sliding_window_size = {size} disagree"
        )
    return size


def _experts(fields: ConfigFields) -> ExpertsCard:
    num_experts, top_k = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if top_k > num_experts or num_experts % groups or top_groups > groups:
        raise CheckpointError(
            f"config.json: {top_k} of {num_experts} experts in {top_groups} of {groups} groups cannot be "
            "chosen (num_experts_per_tok, n_routed_experts, topk_group, n_group)"
        )
    return ExpertsCard(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer("moe_intermediate_size"),
        scoring=fields.choice("scoring_func", ("sigmoid",), "sigmoid"),
        normalise_top_k=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        has_selection_bias=True,
        router_dtype=fields.choice("moe_router_dtype", ("float32", "bfloat16"), "float32"),
        num_groups=groups,
        top_k_groups=top_groups,
    )
