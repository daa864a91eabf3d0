"""A dense Llama re-expressed, exactly, as a MiMo-V2 mixture of experts with token-dependent routing.

In each layer the MLP's neurons are cut into 12 slices; experts j and j + 12 both hold slice j. Router rows
are +c u_j and -c u_j with u_j a random unit vector from a fixed seed, so the sign of u_j . h decides which
of the two is chosen, and c is so large that a sigmoid score is 1 or 0. Choosing 12 of 24 takes one expert
of each pair; each weight is normalised to 1/12, and down_proj holds 12 times the dense values, so the
weighted sum is the dense MLP. All layers are full attention with the whole head rotated, no sinks, no value
scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from interlock.demo.folder import write_json, write_shards
from interlock.demo.llama import LlamaShape, LlamaSource
from interlock.errors import InterlockError

SLICES = 12
ROUTER_GAIN = 2.0**30  # a power of two, so that scaling the unit vectors is exact
ROUTER_SEED = 0
LAYERS_IN_A_FILE = 8

Advance = Callable[[int], None]


def write_moe(source: LlamaSource, folder: Path, *, converted: Advance, written: Advance) -> None:
    """Write the mixture of experts as a float32 folder.

    Args:
        converted: told 1 for each layer.
        written: told the bytes of each file; they sum to ``moe_bytes(source.shape)``.
    """
    shape = source.shape
    if shape.intermediate_size % SLICES:
        raise InterlockError(
            f"an MLP of {shape.intermediate_size} neurons cannot be cut into {SLICES} equal slices"
        )
    files = 1 + -(-shape.layers // LAYERS_IN_A_FILE)
    write_shards(folder, _shards(source, converted), files, advance=written)
    write_json(folder / "config.json", _config(shape))
    write_json(folder / "generation_config.json", generation_config(shape))
    source.write_tokenizer(folder)


def moe_bytes(shape: LlamaShape) -> int:
    """Bytes of all tensors that ``write_moe`` writes."""
    h = shape.hidden_size
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * h
    experts = 2 * 3 * shape.intermediate_size * h
    router = 2 * SLICES * (h + 1)
    return 4 * (2 * shape.vocab_size * h + h + shape.layers * (attention + experts + router + 2 * h))


def generation_config(shape: LlamaShape) -> dict[str, Any]:
    """The parsed generation_config.json."""
    return {
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.pad_token_id,
        "do_sample": False,
    }


def _shards(source: LlamaSource, converted: Advance) -> Iterator[dict[str, torch.Tensor]]:
    embedding = source.tensor("model.embed_tokens")
    yield {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "model.norm.weight": source.tensor("model.norm"),
    }
    del embedding
    generator = torch.Generator().manual_seed(ROUTER_SEED)
    for start in range(0, source.shape.layers, LAYERS_IN_A_FILE):
        shard: dict[str, torch.Tensor] = {}
        for layer in range(start, min(start + LAYERS_IN_A_FILE, source.shape.layers)):
            shard |= _layer(source, f"model.layers.{layer}.", generator)
            converted(1)
        yield shard


def _layer(source: LlamaSource, prefix: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    kept = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"))
    out = {f"{prefix}{name}.weight": source.tensor(prefix + name) for name in kept}
    for name, dimension, scale in (("gate_proj", 0, 1), ("up_proj", 0, 1), ("down_proj", 1, SLICES)):
        dense = source.tensor(f"{prefix}mlp.{name}") * scale
        for j, part in enumerate(dense.chunk(SLICES, dimension)):
            for expert in (j, j + SLICES):
                out[f"{prefix}mlp.experts.{expert}.{name}.weight"] = part.clone()
    directions = torch.randn(SLICES, source.shape.hidden_size, generator=generator)
    rows = ROUTER_GAIN * directions / directions.norm(dim=1, keepdim=True)
    out[f"{prefix}mlp.gate.weight"] = torch.cat([rows, -rows])
    out[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.zeros(2 * SLICES)
    return out


def _config(shape: LlamaShape) -> dict[str, Any]:
    heads = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
    }
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "partial_rotary_factor": 1.0}
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.intermediate_size // SLICES,
        "num_hidden_layers": shape.layers,
        **heads,
        **{f"swa_{name}": value for name, value in heads.items()},
        "sliding_window": 128,
        "sliding_window_size": 128,
        "hybrid_layer_pattern": [0] * shape.layers,
        "moe_layer_freq": [1] * shape.layers,
        "n_routed_experts": 2 * SLICES,
        "n_shared_experts": None,
        "num_experts_per_tok": SLICES,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_value_scale": None,
        "add_swa_attention_sink_bias": False,
        "add_full_attention_sink_bias": False,
        "partial_rotary_factor": 1.0,
        "rope_theta": shape.rope_theta,
        "swa_rope_theta": shape.rope_theta,
        "layernorm_epsilon": shape.norm_eps,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.pad_token_id,
        # read by transformers' own class in place of the fields above
        "layer_types": ["full_attention"] * shape.layers,
        "mlp_layer_types": ["sparse"] * shape.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
    }
