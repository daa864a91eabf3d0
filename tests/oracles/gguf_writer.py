"""MiMo-V2 weights -> a float32 GGUF file (architecture mimo2) for llama.cpp, with only the ``gguf`` package.

The vocabulary written is synthetic: distinct printable ASCII strings, so that no token is a partial UTF-8
sequence (llama.cpp leaves such steps out of its list of log-probabilities). Token ids are the prompts.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from interlock.reference.mimo_v2 import MiMoReference, layer_shape

ALPHABET = [chr(code) for code in range(33, 127)]


def synthetic_tokens(count: int) -> list[str]:
    """``count`` distinct strings: all of one character, then of two, then of three."""
    words = ("".join(w) for n in itertools.count(1) for w in itertools.product(ALPHABET, repeat=n))
    return list(itertools.islice(words, count))


def write_gguf(reference: MiMoReference, path: Path, *, visible: int) -> Path:
    """Write the model. ``visible``: keys a sliding-window query sees with its own (llama.cpp's n_swa).

    llama.cpp asserts that a mimo2 model has a sliding-window layer: in a model without one the last layer is
    marked as such with a window as wide as the context, which changes nothing.
    """
    writer = gguf.GGUFWriter(str(path), "mimo2")
    _write_config(writer, reference.config, visible)
    _write_vocabulary(writer, reference.config["vocab_size"])
    for name, array in _tensors(reference):
        writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], visible: int) -> None:
    layers = [layer_shape(config, layer) for layer in range(config["num_hidden_layers"])]
    sliding = [layer.sliding for layer in layers]
    if not any(sliding):
        sliding[-1], visible = True, config["max_position_embeddings"]
    if (config.get("routed_scaling_factor") or 1.0) != 1.0:
        raise ValueError("routed_scaling_factor has no place in a mimo2 GGUF")
    writer.add_block_count(len(layers))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([layer.kv_heads for layer in layers])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_float32("mimo2.rope.freq_base_swa", float(config["swa_rope_theta"]))
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(layers[0].rotary_dim)
    writer.add_sliding_window(visible)
    writer.add_array("mimo2.attention.sliding_window_pattern", sliding)
    if config.get("attention_value_scale"):
        writer.add_float32("mimo2.attention.value_scale", float(config["attention_value_scale"]))


def _write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = synthetic_tokens(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * size)
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens if len(token) == 2])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(reference: MiMoReference) -> Any:
    """(GGUF name, array) of every tensor; the three projections of all experts are stacked."""
    config, weights = reference.config, reference.weights
    plain = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.qkv_proj.weight": "attn_qkv.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "self_attn.attention_sink_bias": "attn_sinks.weight",
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    }
    yield "token_embd.weight", weights["model.embed_tokens.weight"].numpy()
    yield "output_norm.weight", weights["model.norm.weight"].numpy()
    yield "output.weight", weights["lm_head.weight"].numpy()
    for layer in range(config["num_hidden_layers"]):
        prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
        for ours, theirs in plain.items():
            if prefix + ours in weights:
                yield block + theirs, weights[prefix + ours].numpy()
        if config["moe_layer_freq"][layer]:
            for name in ("gate", "up", "down"):
                stack = [
                    weights[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"].numpy()
                    for expert in range(config["n_routed_experts"])
                ]
                yield f"{block}ffn_{name}_exps.weight", np.stack(stack)
