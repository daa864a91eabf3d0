"""Names and shapes of the tensors in a Qwen3-MoE checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from interlock.checkpoint.specs import TensorSpec
from interlock.models.decoder_weights import decoder_specs
from interlock.plan.card import ModelCard

SKIPPED_PREFIXES: tuple[str, ...] = ()


def tensor_specs(card: ModelCard) -> Iterator[TensorSpec]:
    """Every tensor of the model."""
    yield from decoder_specs(card)
