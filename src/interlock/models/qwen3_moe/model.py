"""Qwen3-MoE: full attention with RMSNorm on each q and k head, softmax-routed experts."""

from __future__ import annotations

from interlock.checkpoint.source import WeightSource
from interlock.models.decoder import Decoder
from interlock.models.qwen3_moe.weights import SKIPPED_PREFIXES, tensor_specs


class Qwen3Moe(Decoder):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and relatives."""

    def load(self, checkpoint: WeightSource) -> None:
        self.load_weights(checkpoint, list(tensor_specs(self.context.plan.card)), SKIPPED_PREFIXES)
