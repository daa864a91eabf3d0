"""MiMo-V2 (text part) in float64, from a checkpoint folder in any of its layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlock.reference import ops
from interlock.reference.weights import SCALE_SUFFIX, block_size, plain_weights, read_folder


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What differs between full-attention and sliding-window layers."""

    sliding: bool
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    theta: float
    rotary_dim: int


@dataclass(slots=True)
class MiMoReference:
    """Config and plain float32 weights; ``forward`` computes in ``dtype``.

    Attributes:
        config: the hub's spelling of config.json (``hybrid_layer_pattern``, ``rope_theta``, ...).
        weights: without fp8; a fused qkv has the rows [all q; all k; all v].
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    @classmethod
    def load(cls, folder: str | Path, *, qkv_layout: str = "auto") -> MiMoReference:
        """``qkv_layout`` "plain" or "chunked" is needed where scale rows do not tell.

        Raises:
            ValueError: the row order of a fused qkv cannot be told.
        """
        config, stored = read_folder(folder)
        chunks = _chunked_tensors(config, stored, qkv_layout)
        weights = plain_weights(config, stored, chunked_qkv=chunks)
        for name, count in chunks.items():
            shape = layer_shape(config, int(name.split(".")[2]))
            weights[name] = _unchunk(weights[name], count, shape)
        return cls(config, weights)

    def logprobs(self, token_ids: Sequence[int], *, window_extra: int = 0) -> torch.Tensor:
        """Log-probabilities float64 [T, V] of the token after each position."""
        return torch.log_softmax(self.forward(token_ids, window_extra=window_extra), -1)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Sequence[int],
        *,
        window_extra: int = 0,
        dtype: torch.dtype = torch.float64,
        routes: list[torch.Tensor] | None = None,
        gaps: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logits [T, V].

        Args:
            routes: receives the expert ids [T, k] of each MoE layer.
            gaps: receives [T] of each MoE layer: by how much the last chosen expert's score is above the
                first unchosen one's. Ways of computing that differ by rounding may differ in their choice
                where a gap is as small as rounding.
        """
        config = self.config
        eps = config.get("layernorm_epsilon") or config["rms_norm_eps"]
        x = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)].to(dtype)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            h = ops.rms_norm(x, self._weight(prefix + "input_layernorm.weight", dtype), eps)
            x = x + self._attention(h, layer, prefix + "self_attn.", window_extra)
            h = ops.rms_norm(x, self._weight(prefix + "post_attention_layernorm.weight", dtype), eps)
            if config["moe_layer_freq"][layer]:
                x = x + self._experts(h, prefix + "mlp.", routes, gaps)
            else:
                x = x + self._mlp(h, prefix + "mlp.")
        x = ops.rms_norm(x, self._weight("model.norm.weight", dtype), eps)
        tied = config.get("tie_word_embeddings") and "lm_head.weight" not in self.weights
        return x @ self._weight("model.embed_tokens.weight" if tied else "lm_head.weight", dtype).T

    def _weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.weights[name].to(dtype)

    def _attention(self, h: torch.Tensor, layer: int, prefix: str, window_extra: int) -> torch.Tensor:
        shape, dtype = layer_shape(self.config, layer), h.dtype
        sizes = [
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
            shape.kv_heads * shape.v_head_dim,
        ]
        if prefix + "qkv_proj.weight" in self.weights:
            q, k, v = torch.split(h @ self._weight(prefix + "qkv_proj.weight", dtype).T, sizes, -1)
        else:
            q, k, v = (h @ self._weight(f"{prefix}{name}_proj.weight", dtype).T for name in "qkv")
        q, k = (
            ops.rope(t.reshape(len(h), -1, shape.head_dim), theta=shape.theta, rotary_dim=shape.rotary_dim)
            for t in (q, k)
        )
        v = v.reshape(len(h), -1, shape.v_head_dim) * (self.config.get("attention_value_scale") or 1.0)
        kind = "swa" if shape.sliding else "full"
        sinks = None
        if self.config.get(f"add_{kind}_attention_sink_bias", shape.sliding):
            sinks = self._weight(prefix + "attention_sink_bias", dtype)
        visible = _window(self.config) + window_extra if shape.sliding else None
        return (
            ops.attention(q, k, v, visible=visible, sinks=sinks)
            @ self._weight(prefix + "o_proj.weight", dtype).T
        )

    def _mlp(self, h: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up, down = (
            self._weight(f"{prefix}{name}_proj.weight", h.dtype) for name in ("gate", "up", "down")
        )
        return ops.swiglu(h, gate, up, down)

    def _experts(
        self,
        h: torch.Tensor,
        prefix: str,
        routes: list[torch.Tensor] | None,
        gaps: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        """Sigmoid scores; the bias takes part in the choice only, never in the weights."""
        config = self.config
        if (config.get("n_group") or 1) != 1:
            raise ValueError("the reference has no expert groups (no MiMo-V2 release has more than one)")
        scores = torch.sigmoid(h @ self._weight(prefix + "gate.weight", h.dtype).T)
        choice = scores + self._weight(prefix + "gate.e_score_correction_bias", h.dtype)
        ids = choice.topk(config["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, ids)
        if config.get("norm_topk_prob", True):
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * (config.get("routed_scaling_factor") or 1.0)
        if routes is not None:
            routes.append(ids)
        if gaps is not None:
            ranked = choice.sort(-1, descending=True).values
            last = config["num_experts_per_tok"] - 1
            gaps.append(ranked[:, last] - ranked[:, last + 1])
        return ops.mixture(h, ids, weights, lambda rows, e: self._mlp(rows, f"{prefix}experts.{e}."))


def layer_shape(config: Mapping[str, Any], layer: int) -> LayerShape:
    """Heads, sizes and rope of one layer from the hub's spelling of the config."""
    sliding = config["hybrid_layer_pattern"][layer] == 1
    prefix = "swa_" if sliding else ""

    def pick(key: str) -> Any:
        return config.get(prefix + key, config[key])

    head_dim = pick("head_dim")
    factor = config.get("partial_rotary_factor") or config["rope_parameters"]["partial_rotary_factor"]
    return LayerShape(
        sliding=sliding,
        heads=pick("num_attention_heads"),
        kv_heads=pick("num_key_value_heads"),
        head_dim=head_dim,
        v_head_dim=pick("v_head_dim"),
        theta=config["swa_rope_theta"] if sliding else config["rope_theta"],
        rotary_dim=int(head_dim * factor),
    )


def _window(config: Mapping[str, Any]) -> int:
    return int(config.get("sliding_window_size") or config["sliding_window"])


def _chunked_tensors(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], qkv_layout: str
) -> dict[str, int]:
    """Fused tensors stored in chunks -> number of chunks; empty when they are plain or there are none."""
    fused = [name for name in stored if name.endswith("self_attn.qkv_proj.weight")]
    chunks = config["num_key_value_heads"]
    if not fused or qkv_layout == "plain" or chunks == 1:
        return {}
    if qkv_layout == "auto":
        block, found = block_size(config)[0], set()
        for name in fused:
            rows, scale = stored[name].shape[0], stored.get(name + SCALE_SUFFIX)
            restarting, flat = chunks * -(-(rows // chunks) // block), -(-rows // block)
            if scale is not None and restarting != flat:
                found.add({restarting: "chunked", flat: "plain"}[scale.shape[0]])
        if len(found) != 1:
            raise ValueError("scale rows do not tell the order of the fused qkv rows; pass qkv_layout")
        qkv_layout = found.pop()
    return dict.fromkeys(fused, chunks) if qkv_layout == "chunked" else {}


def _unchunk(fused: torch.Tensor, chunks: int, shape: LayerShape) -> torch.Tensor:
    """Chunks [q_c | k_c | v_c] -> [all q; all k; all v]."""
    q = shape.heads // chunks * shape.head_dim
    k = shape.kv_heads // chunks * shape.head_dim
    pieces = fused.chunk(chunks)
    return torch.cat([p[:q] for p in pieces] + [p[q : q + k] for p in pieces] + [p[q + k :] for p in pieces])
