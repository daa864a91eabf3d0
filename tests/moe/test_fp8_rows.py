"""Quantised rows: any number of them, and never outside the format."""

from __future__ import annotations

import pytest
import torch

from interlock.moe.fp8_rows import dequantise_rows, quantise_rows

E4M3_MAX = 448.0


@pytest.mark.parametrize("shape", [(0, 256), (0, 128), (1, 256), (3, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_down_to_no_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """D07: no rows give no rows and no scales."""
    rows = torch.randn(shape, dtype=dtype)
    values, scales = quantise_rows(rows)
    assert values.shape == shape
    assert scales.shape == (shape[0], shape[1] // 128)
    back = dequantise_rows(values, scales, torch.float32)
    grouped = (shape[0], shape[1] // 128, 128)
    largest = rows.float().view(grouped).abs().amax(-1, keepdim=True)
    assert ((back - rows.float()).view(grouped).abs() <= largest * 16.001 / E4M3_MAX).all()


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, 3e38])
def test_every_magnitude_stays_in_range(value: float) -> None:
    """D12: what is cast is at most 448 in size, so nothing becomes NaN."""
    values, scales = quantise_rows(torch.full((2, 128), value))
    assert (values.float().abs() <= E4M3_MAX).all()
    assert torch.isfinite(dequantise_rows(values, scales, torch.float64)).all()
