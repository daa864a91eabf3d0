"""Prompts and chunkings that cross the window (16) and the pages (16) of the tiny models."""

from __future__ import annotations

import torch

PROMPT = [(i * 37 + 11) % 500 + 3 for i in range(40)]
CHUNKINGS = [None, 1, 7, 16, 17, [16, 17, 1, 1, 5], [39, 1]]
TOLERANCE = 5e-5
"""Largest allowed difference of a log-probability between engines in float32."""


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite."""
    return float((a - b).abs().nan_to_num(nan=float("inf")).max())
