"""What another library offers to block-fp8 linears. No Triton here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch


class DenseProducts(Protocol):
    """Products of all rows with one weight, each compiled for one number of rows."""

    def dense(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        own: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """x e4m3 [n, K], x_scales float32 [K / 128, n], weight e4m3 [N, K], scales float32 [ceil(N / 128),
        K / 128] -> bfloat16 [n, N], summed in float32 and rounded once; None where it is not compiled for
        these sizes, or gave something else than ``own`` at its first call. A rehearsal has it compiled."""


@runtime_checkable
class TakesDenseProducts(Protocol):
    """A kernel set whose linears may take them, where its stored table says so."""

    def take_dense_products(self, products: DenseProducts) -> None:
        """From now on; the last ones count."""
