"""The dense model that the demo re-expresses, as a LlamaForCausalLM folder: the right answer for the demo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from interlock.demo.convert import LAYERS_IN_A_FILE, Advance, generation_config
from interlock.demo.folder import write_json, write_shards
from interlock.demo.llama import LlamaShape, LlamaSource

_IN_A_LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
)


def write_dense(source: LlamaSource, folder: Path, *, converted: Advance, written: Advance) -> None:
    """Write the dense model as a float32 folder that transformers reads; arguments as for ``write_moe``."""
    shape = source.shape
    files = 1 + -(-shape.layers // LAYERS_IN_A_FILE)
    write_shards(folder, _shards(source, converted), files, advance=written)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        **generation_config(shape),
    }
    del config["do_sample"]
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(shape))
    source.write_tokenizer(folder)


def dense_bytes(shape: LlamaShape) -> int:
    """Bytes of all tensors that ``write_dense`` writes."""
    h = shape.hidden_size
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * h
    layer = attention + 3 * shape.intermediate_size * h + 2 * h
    return 4 * (shape.vocab_size * h + h + shape.layers * layer)


def _shards(source: LlamaSource, converted: Advance) -> Iterator[dict[str, torch.Tensor]]:
    yield {f"{name}.weight": source.tensor(name) for name in ("model.embed_tokens", "model.norm")}
    for start in range(0, source.shape.layers, LAYERS_IN_A_FILE):
        shard: dict[str, torch.Tensor] = {}
        for layer in range(start, min(start + LAYERS_IN_A_FILE, source.shape.layers)):
            names = [f"model.layers.{layer}.{name}" for name in _IN_A_LAYER]
            shard |= {f"{name}.weight": source.tensor(name) for name in names}
            converted(1)
        yield shard
