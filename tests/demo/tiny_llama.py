"""A dense Llama of a few kilobytes in each form that the demo can be made from."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from interlock.demo.gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_config
from interlock.demo.tiny_tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    TRAINING_TEXT,
    byte_alphabet,
    train_merges,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TO_GGUF = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}


def vocabulary() -> dict[str, Any]:
    """The tokenizer's part of a GGUF file's metadata."""
    alphabet = byte_alphabet()
    tokens = [*SPECIAL_TOKENS, *(alphabet[byte] for byte in range(256))]
    merges = train_merges(TRAINING_TEXT, CONFIG["vocab_size"] - len(tokens))
    tokens = list(dict.fromkeys([*tokens, *(left + right for left, right in merges)]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        "llama.context_length": CONFIG["max_position_embeddings"],
    }


def weights() -> dict[str, torch.Tensor]:
    """float32 tensors by their Hugging Face names."""
    generator = torch.Generator().manual_seed(3)
    h, width, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    heads, kv = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (CONFIG["vocab_size"], h),
        "model.norm": (h,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm": (h,),
            prefix + "post_attention_layernorm": (h,),
            prefix + "self_attn.q_proj": (heads * head, h),
            prefix + "self_attn.k_proj": (kv * head, h),
            prefix + "self_attn.v_proj": (kv * head, h),
            prefix + "self_attn.o_proj": (h, heads * head),
            prefix + "mlp.gate_proj": (width, h),
            prefix + "mlp.up_proj": (width, h),
            prefix + "mlp.down_proj": (h, width),
        }
    out = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        out[name + ".weight"] = 1 + 0.1 * value if len(shape) == 1 else value * (1.5 / shape[-1] ** 0.5)
    return out


def write_llama_folder(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder; ``changes`` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    metadata = vocabulary()
    gguf_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(gguf_tokenizer_config(metadata)))
    return folder


def write_llama_gguf(path: Path, kind: str = "F32", **changes: Any) -> Path:
    """A GGUF file as llama.cpp's converter writes it, with matrices in format ``kind``."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), changes.get("architecture", "llama"))
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    metadata = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("split", "smollm"))
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in weights().items():
        values = gguf_rows(name, tensor.numpy())
        quantisation = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else kind]
        data = gguf.quants.quantize(values, quantisation)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    short = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts = name.removesuffix(".weight").split(".")
    if parts[1] != "layers":
        return {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"
    last = parts[-1].removesuffix("_proj")
    own = short.get(last) or (TO_GGUF[last] if parts[3] == "self_attn" else f"ffn_{last}")
    return f"blk.{parts[2]}.{own}.weight"


def gguf_rows(name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp's order of q and k rows, written out row by row."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    head = CONFIG["head_dim"]
    order = [
        start + half * head // 2 + pair
        for start in range(0, len(values), head)
        for pair in range(head // 2)
        for half in range(2)
    ]
    return values[order]


def write_wheel(path: Path, **members: bytes) -> Path:
    """A wheel that pip accepts; ``members`` by file name inside the package, "__" standing for "."."""
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info/"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in members.items():
            wheel.writestr(f"{name}/{member.replace('__', '.')}", data)
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    return path
