"""Rows of fp8 (e4m3) with one float32 scale for each 128 channels: quantise and dequantise.

A row of NaN stays NaN, a row of zeros gets scale 1 (never 0 / 0), and values are clamped before the cast
because e4m3 has no infinity: beyond 448 it would give NaN.
"""

from __future__ import annotations

import torch

from interlock.moe.a2a.rows import SCALE_GROUP

_LARGEST = 448.0


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., h] float -> (e4m3 [..., h], float32 scales [..., ceil(h / 128)]); row = value * scale."""
    width = rows.shape[-1]
    groups = -(-width // SCALE_GROUP)
    padded = torch.nn.functional.pad(rows.float(), (0, groups * SCALE_GROUP - width))
    grouped = padded.view(*rows.shape[:-1], groups, SCALE_GROUP)
    largest = grouped.abs().amax(dim=-1)
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / _LARGEST)
    values = (grouped / scales.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return values.flatten(-2)[..., :width].to(torch.float8_e4m3fn), scales


def dequantise_rows(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: float32 product, rounded once to ``dtype``."""
    spread = scales.repeat_interleave(SCALE_GROUP, dim=-1)[..., : values.shape[-1]]
    return (values.float() * spread).to(dtype)
