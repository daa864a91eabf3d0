"""Block-quantised fp8 weights: value = e4m3 * scale of its block (``weight_scale_inv``, which multiplies)."""

from __future__ import annotations

import torch


def scale_row_of(row: torch.Tensor, *, rows: int, block_rows: int, chunks: int) -> torch.Tensor:
    """Scale-grid row of each stored row: row r of chunk c -> c * ceil(chunk rows / block) + r // block."""
    chunk_rows = rows // chunks
    return row // chunk_rows * -(-chunk_rows // block_rows) + row % chunk_rows // block_rows


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block_columns: int) -> torch.Tensor:
    """weight e4m3 [n, K], scale float32 [n, ceil(K / block_columns)] (a grid row for each row) -> float32.

    The last block of columns may be partial.
    """
    values = weight.to(torch.float32)
    whole = values.shape[1] // block_columns
    if whole:
        blocks = values[:, : whole * block_columns].view(len(values), whole, block_columns)
        blocks.mul_(scale[:, :whole, None])
    if values.shape[1] > whole * block_columns:
        values[:, whole * block_columns :].mul_(scale[:, whole : whole + 1])
    return values
