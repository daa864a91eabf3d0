"""Names and shapes of the tensors in a MiMo-V2 checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from interlock.checkpoint.specs import TensorSpec
from interlock.models.decoder_weights import decoder_specs
from interlock.plan.card import ModelCard

SKIPPED_PREFIXES = ("visual.", "audio_encoder.", "speech_embeddings.", "model.mtp.")
"""Vision tower, audio towers and multi-token-prediction layers: not part of the text model served here."""


def tensor_specs(card: ModelCard) -> Iterator[TensorSpec]:
    """Every tensor of the text model."""
    yield from decoder_specs(card)
