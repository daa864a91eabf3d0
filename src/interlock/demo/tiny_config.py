"""config.json and generation_config.json of a tiny checkpoint, with the field names of the releases."""

from __future__ import annotations

from typing import Any

from interlock.demo.tiny_spec import TinySpec

PAD_ID, IM_START_ID, EOS_ID = 0, 1, 2


def tiny_config(spec: TinySpec) -> dict[str, Any]:
    """The parsed config.json for a spec."""
    common = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_cache": True,
        "dtype": spec.dtype,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    config = {**common, **(_mimo_v2(spec) if spec.family == "mimo_v2" else _qwen3_moe(spec))}
    if spec.fp8:
        config["quantization_config"] = _fp8(spec)
    return config


def tiny_generation_config() -> dict[str, Any]:
    """Both the end of a turn and the end of text stop a generation, as in MiMo-V2."""
    return {"eos_token_id": [EOS_ID, PAD_ID], "pad_token_id": PAD_ID, "do_sample": False}


def _mimo_v2(spec: TinySpec) -> dict[str, Any]:
    pattern = spec.layer_pattern()
    flash = spec.qkv == "split"
    config: dict[str, Any] = {
        "architectures": ["MiMoV2FlashForCausalLM" if flash else "MiMoV2ForCausalLM"],
        "model_type": "mimo_v2_flash" if flash else "mimo_v2",
        "v_head_dim": spec.v_head_dim,
        "swa_num_attention_heads": spec.num_heads,
        "swa_num_key_value_heads": spec.swa_num_kv_heads,
        "swa_head_dim": spec.head_dim,
        "swa_v_head_dim": spec.v_head_dim,
        "swa_rope_theta": spec.swa_rope_theta,
        "sliding_window": spec.window,
        "sliding_window_size": spec.window,
        "attention_chunk_size": spec.window,
        "hybrid_layer_pattern": list(pattern),
        "moe_layer_freq": [int(layer >= spec.dense_layers) for layer in range(spec.layers)],
        "n_routed_experts": spec.experts,
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": spec.routed_scaling_factor,
        "attention_value_scale": spec.value_scale,
        "add_swa_attention_sink_bias": spec.sinks,
        "add_full_attention_sink_bias": False,
        "partial_rotary_factor": spec.partial_rotary_factor,
        "layernorm_epsilon": spec.norm_eps,
    }
    if not flash:
        config["attention_projection_layout"] = "fused_qkv"
        return config
    rotary = spec.partial_rotary_factor
    config |= {  # read by transformers' own class in place of the fields above
        "layer_types": ["sliding_attention" if swa else "full_attention" for swa in pattern],
        "mlp_layer_types": ["sparse" if freq else "dense" for freq in config["moe_layer_freq"]],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary}
            for kind, theta in (
                ("full_attention", spec.rope_theta),
                ("sliding_attention", spec.swa_rope_theta),
            )
        },
        "rms_norm_eps": spec.norm_eps,
    }
    return config


def _qwen3_moe(spec: TinySpec) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": spec.experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(spec.dense_layers)),
        "rms_norm_eps": spec.norm_eps,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": spec.layers,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _fp8(spec: TinySpec) -> dict[str, Any]:
    fp8: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    if spec.family == "mimo_v2":
        layers = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(spec.layers)]
        fp8["ignored_layers"] = [*layers, "model.decoder.self_attn.o_proj"]
    return fp8
