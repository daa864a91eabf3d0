"""Qwen3-MoE in float64, from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlock.reference import ops
from interlock.reference.weights import plain_weights, read_folder


@dataclass(slots=True)
class Qwen3MoeReference:
    """Config and plain float32 weights; ``forward`` computes in ``dtype``."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    @classmethod
    def load(cls, folder: str | Path) -> Qwen3MoeReference:
        config, stored = read_folder(folder)
        return cls(config, plain_weights(config, stored, chunked_qkv={}))

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities float64 [T, V] of the token after each position."""
        return torch.log_softmax(self.forward(token_ids), -1)

    @torch.no_grad()
    def forward(self, token_ids: Sequence[int], *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Logits [T, V]."""
        config = self.config
        eps, step = config["rms_norm_eps"], config.get("decoder_sparse_step", 1)
        x = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)].to(dtype)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            h = ops.rms_norm(x, self._weight(prefix + "input_layernorm.weight", dtype), eps)
            x = x + self._attention(h, prefix + "self_attn.")
            h = ops.rms_norm(x, self._weight(prefix + "post_attention_layernorm.weight", dtype), eps)
            dense = layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step
            x = x + (self._mlp(h, prefix + "mlp.") if dense else self._experts(h, prefix + "mlp."))
        x = ops.rms_norm(x, self._weight("model.norm.weight", dtype), eps)
        tied = config.get("tie_word_embeddings") and "lm_head.weight" not in self.weights
        return x @ self._weight("model.embed_tokens.weight" if tied else "lm_head.weight", dtype).T

    def _weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.weights[name].to(dtype)

    def _attention(self, h: torch.Tensor, prefix: str) -> torch.Tensor:
        """RMSNorm over each q and k head before rope."""
        config, width = self.config, self.config["head_dim"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        q, k, v = (
            (h @ self._weight(f"{prefix}{name}_proj.weight", h.dtype).T).view(len(h), -1, width)
            for name in "qkv"
        )
        q, k = (
            ops.rope(
                ops.rms_norm(t, self._weight(prefix + norm, h.dtype), config["rms_norm_eps"]),
                theta=theta,
                rotary_dim=width,
            )
            for t, norm in ((q, "q_norm.weight"), (k, "k_norm.weight"))
        )
        return ops.attention(q, k, v) @ self._weight(prefix + "o_proj.weight", h.dtype).T

    def _mlp(self, h: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up, down = (
            self._weight(f"{prefix}{name}_proj.weight", h.dtype) for name in ("gate", "up", "down")
        )
        return ops.swiglu(h, gate, up, down)

    def _experts(self, h: torch.Tensor, prefix: str) -> torch.Tensor:
        """Softmax over all experts, then the best k, renormalised when ``norm_topk_prob``."""
        scores = torch.softmax(h @ self._weight(prefix + "gate.weight", h.dtype).T, -1)
        weights, ids = scores.topk(self.config["num_experts_per_tok"], -1)
        if self.config.get("norm_topk_prob", False):
            weights = weights / weights.sum(-1, keepdim=True)
        return ops.mixture(h, ids, weights, lambda rows, e: self._mlp(rows, f"{prefix}experts.{e}."))
