"""A step that was handed to the device, and what it will have sampled."""

from __future__ import annotations

from typing import Protocol

import torch

from interlock.engine.sampled import SampledTokens


class Launched(Protocol):
    """Attributes:
    tokens: int64 [m] on the device, drawn when the work queued so far is done; -1 or anything for rows
        whose logits are not finite.
    """

    tokens: torch.Tensor

    def result(self) -> SampledTokens:
        """Wait for the step and say what it sampled."""


class Done:
    """A step that was computed at once."""

    def __init__(self, sampled: SampledTokens) -> None:
        self.tokens = torch.from_numpy(sampled.token_ids)
        self._sampled = sampled

    def result(self) -> SampledTokens:
        return self._sampled
