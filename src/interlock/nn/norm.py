"""RMSNorm, alone or after adding to the residual stream."""

from __future__ import annotations

import torch

from interlock.checkpoint.source import WeightSource
from interlock.kernels.base import QuantisedRows, QuantisingKernels
from interlock.nn.context import ModelContext


class RMSNorm:
    """x [..., h] * rsqrt(mean(x^2) + eps) * weight; the weight is plain, not 1 + weight."""

    def __init__(self, context: ModelContext, eps: float) -> None:
        self._kernels, self._device, self._dtype = context.kernels, context.device, context.dtype
        self._eps = eps
        self._weight = torch.empty(0)

    def load(self, source: WeightSource, name: str) -> None:
        self._weight = source.read(name, dtype=self._dtype).to(self._device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)

    def add_for(
        self, x: torch.Tensor, residual: torch.Tensor | None, *, quantised: bool
    ) -> tuple[torch.Tensor | QuantisedRows, torch.Tensor]:
        """``add`` for a reader that takes quantised rows (or does not); without a residual, (norm(x), x)."""
        if quantised:
            assert isinstance(self._kernels, QuantisingKernels), "the reader's kernels are this norm's"
            return self._kernels.add_rms_norm_quantised(x, residual, self._weight, self._eps)
        return (self(x), x) if residual is None else self.add(x, residual)
