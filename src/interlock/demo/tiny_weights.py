"""Random weights of a tiny checkpoint: as they are stored, and as the plain values a loader must arrive at.

Scales are chosen for lively logits (standard deviation near 1.6) and token-dependent routing.
fp8 blocks: value = e4m3 * scale, one float32 scale for each 128x128 block, edge blocks may be partial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from interlock.demo.tiny_spec import TinySpec

BLOCK = 128
E4M3_MAX = 448.0


@dataclass
class TinyWeights:
    """``stored``: tensors by checkpoint name. ``reference``: float32, dequantised, q/k/v always split."""

    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    reference: dict[str, torch.Tensor] = field(default_factory=dict)


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [n, k] -> (e4m3 [n, k], float32 scales [ceil(n/128), ceil(k/128)], dequantised [n, k])."""
    rows, columns = weight.shape
    row_blocks, column_blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(row_blocks * BLOCK, column_blocks * BLOCK)
    padded[:rows, :columns] = weight
    tiles = padded.view(row_blocks, BLOCK, column_blocks, BLOCK)
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / E4M3_MAX
    quantised = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    plain = (quantised.float() * scale).view(padded.shape)[:rows, :columns].contiguous()
    bytes_ = quantised.view(torch.uint8).view(padded.shape)[:rows, :columns].contiguous()
    return bytes_.view(torch.float8_e4m3fn), scale.view(row_blocks, column_blocks).contiguous(), plain


class _Builder:
    def __init__(self, spec: TinySpec) -> None:
        self.spec = spec
        self.rng = np.random.default_rng(spec.seed)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.weights = TinyWeights()

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        values = self.rng.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values * np.float32(std) + np.float32(mean))

    def matrix(self, rows: int, columns: int, gain: float) -> torch.Tensor:
        """A linear whose output has standard deviation ``gain`` for unit-variance input."""
        return self.normal(rows, columns, std=gain / columns**0.5)

    def put(self, name: str, value: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        stored = value.to(dtype or self.dtype)
        self.weights.stored[name] = stored
        self.weights.reference[name] = stored.float()

    def put_linear(self, name: str, value: torch.Tensor) -> None:
        """A linear that the fp8 format quantises."""
        if not self.spec.fp8:
            self.put(name, value)
            return
        stored = self.weights.stored
        stored[name], stored[name + "_scale_inv"], self.weights.reference[name] = quantise_blocks(value)

    def put_fused(self, name: str, chunks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Store row chunks, each with its own scale grid, as one tensor; returns the plain float32 rows."""
        if not self.spec.fp8:
            stored = torch.cat(list(chunks)).to(self.dtype)
            self.weights.stored[name] = stored
            return stored.float()
        parts = [quantise_blocks(chunk) for chunk in chunks]
        rows = torch.cat([part[0].view(torch.uint8) for part in parts])
        self.weights.stored[name] = rows.view(torch.float8_e4m3fn)
        self.weights.stored[name + "_scale_inv"] = torch.cat([part[1] for part in parts])
        return torch.cat([part[2] for part in parts])

    def attention(self, layer: int) -> None:
        spec, prefix = self.spec, f"model.layers.{layer}.self_attn."
        kv = spec.kv_heads(layer)
        sizes = (spec.num_heads * spec.head_dim, kv * spec.head_dim, kv * spec.v_head_dim)
        q, k, v = (
            self.matrix(rows, spec.hidden_size, gain)
            for rows, gain in zip(sizes, (1.3, 1.3, 0.8), strict=True)
        )
        if spec.qkv == "split":
            for letter, value in zip("qkv", (q, k, v), strict=True):
                self.put_linear(f"{prefix}{letter}_proj.weight", value)
        else:
            self._fused_qkv(prefix, q, k, v)
        out = self.matrix(spec.hidden_size, spec.num_heads * spec.v_head_dim, 2.0)
        store = self.put_linear if spec.family == "qwen3_moe" else self.put
        store(prefix + "o_proj.weight", out)
        if spec.family == "qwen3_moe":
            for name in ("q_norm", "k_norm"):
                self.put(f"{prefix}{name}.weight", self.normal(spec.head_dim, std=0.1, mean=1.0))
        elif spec.sinks and spec.layer_pattern()[layer]:
            self.put(prefix + "attention_sink_bias", self.normal(spec.num_heads, std=1.0))

    def _fused_qkv(self, prefix: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        count = self.spec.num_kv_heads if self.spec.qkv == "chunked" else 1
        trios = zip(q.chunk(count), k.chunk(count), v.chunk(count), strict=True)
        plain = self.put_fused(prefix + "qkv_proj.weight", (torch.cat(trio) for trio in trios))
        widths = [len(part) // count for part in (q, k, v)]
        split = [torch.split(chunk, widths) for chunk in plain.chunk(count)]
        for i, letter in enumerate("qkv"):
            self.weights.reference[f"{prefix}{letter}_proj.weight"] = torch.cat([parts[i] for parts in split])

    def mlp(self, prefix: str, width: int) -> None:
        hidden = self.spec.hidden_size
        self.put_linear(prefix + "gate_proj.weight", self.matrix(width, hidden, 1.6))
        self.put_linear(prefix + "up_proj.weight", self.matrix(width, hidden, 1.6))
        self.put_linear(prefix + "down_proj.weight", self.matrix(hidden, width, 1.2))

    def feed_forward(self, layer: int) -> None:
        spec, prefix = self.spec, f"model.layers.{layer}.mlp."
        if layer < spec.dense_layers:
            self.mlp(prefix, spec.intermediate_size)
            return
        router_dtype = torch.float32 if spec.family == "mimo_v2" else None
        self.put(prefix + "gate.weight", self.matrix(spec.experts, spec.hidden_size, 1.6), router_dtype)
        if spec.family == "mimo_v2":
            bias = self.normal(spec.experts, std=0.3)
            self.put(prefix + "gate.e_score_correction_bias", bias, torch.float32)
        for expert in range(spec.experts):
            self.mlp(f"{prefix}experts.{expert}.", spec.moe_intermediate_size)

    def build(self) -> TinyWeights:
        spec = self.spec
        embedding_std = 0.8 / spec.hidden_size**0.5 if spec.tie_word_embeddings else 0.5
        self.put(
            "model.embed_tokens.weight", self.normal(spec.vocab_size, spec.hidden_size, std=embedding_std)
        )
        if not spec.tie_word_embeddings:
            self.put("lm_head.weight", self.matrix(spec.vocab_size, spec.hidden_size, 0.8))
        self.put("model.norm.weight", self.normal(spec.hidden_size, std=0.1, mean=1.0))
        for layer in range(spec.layers):
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm = self.normal(spec.hidden_size, std=0.1, mean=1.0)
                self.put(f"model.layers.{layer}.{name}.weight", norm)
            self.attention(layer)
            self.feed_forward(layer)
        return self.weights


def tiny_weights(spec: TinySpec) -> TinyWeights:
    """All tensors of a tiny checkpoint; the same values for the same spec on every machine."""
    return _Builder(spec).build()
