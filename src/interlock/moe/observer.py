"""What a step that is inspected tells: the seam between the layers and ``engine/recorder.py``."""

from __future__ import annotations

from typing import Protocol

import torch

from interlock.moe.routing import Router, Routes


class LayerObserver(Protocol):
    """Told what the layers of one rank compute, in order. Legend: n rows of the step, h hidden size."""

    def computed(self, layer: int, part: str, output: torch.Tensor) -> None:
        """``part`` is "attention" or "mlp" (experts included); output [n, h] before it joins the stream."""

    def routed(
        self, layer: int, first_row: int, hidden: torch.Tensor, router: Router, routes: Routes
    ) -> Routes:
        """The routes of rows ``first_row :`` of the step, from ``hidden`` [m, h]; returns those to use."""
