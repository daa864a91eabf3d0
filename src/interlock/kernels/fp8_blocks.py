"""Block-scaled fp8 weights, and the linear that is computed with them (W8A8), in plain torch.

value = e4m3 * scale of its block of 128 x 128; blocks at the end of a side may be partial. Activations are
quantised row by row in groups of 128 channels; products are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import pad

from interlock.kernels.triton.expert_tensors import GROUP, quantise_blocks
from interlock.kernels.triton.row_blocks import reference_quantise

BLOCK: Final = GROUP
"""A side of a block, and the channels of an activation group."""


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """values e4m3 [N, K]; scales float32 [ceil(N / 128), ceil(K / 128)]."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def quantised(weight: torch.Tensor) -> Fp8Blocks:
        """A float weight [N, K] with the largest value of each block at 448."""
        return Fp8Blocks(*quantise_blocks(weight))

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def to(self, device: torch.device) -> Fp8Blocks:
        return Fp8Blocks(self.values.to(device), self.scales.to(device))

    def rows(self, part: range) -> Fp8Blocks:
        """Views of some rows. Raises ValueError where they do not begin with a block."""
        first, last = _blocks(part, "rows")
        return Fp8Blocks(self.values[part.start : part.stop], self.scales[first:last])

    def columns(self, part: range) -> Fp8Blocks:
        """Views of some columns. Raises ValueError where they do not begin with a block."""
        first, last = _blocks(part, "columns")
        return Fp8Blocks(self.values[:, part.start : part.stop], self.scales[:, first:last])

    def padded(self, rows: int, columns: int) -> Fp8Blocks:
        """Zeros appended up to ``rows`` x ``columns``; their blocks have scale 1."""
        more_rows, more_columns = rows - self.values.shape[0], columns - self.values.shape[1]
        if not more_rows and not more_columns:
            return self
        values = pad(self.values.view(torch.uint8), (0, more_columns, 0, more_rows)).view(self.values.dtype)
        grid = self.scales.shape
        extra = (0, -(-columns // BLOCK) - grid[1], 0, -(-rows // BLOCK) - grid[0])
        return Fp8Blocks(values, pad(self.scales, extra, value=1.0))

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K]: float32 product, rounded once."""
        return (self.values.float() * spread(self.scales, self.shape)).to(dtype)


def spread(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A scale for every element: [ceil(N / 128), ceil(K / 128)] -> [N, K]."""
    return scales.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]


def stack_rows(parts: Sequence[Fp8Blocks]) -> Fp8Blocks:
    """One weight below the other. Raises ValueError where one but the last ends within a block."""
    for part in parts[:-1]:
        if part.values.shape[0] % BLOCK:
            raise ValueError(
                f"{part.values.shape[0]} rows of block-fp8 weights cannot be followed by others: "
                f"they end within a block of {BLOCK}"
            )
    if len(parts) == 1:
        return parts[0]
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    return Fp8Blocks(values, torch.cat([part.scales for part in parts]))


def linear_w8a8(x: torch.Tensor, weight: Fp8Blocks, out_dtype: torch.dtype) -> torch.Tensor:
    """x [n, K] quantised in groups of 128 times the transposed weight -> [n, N]; K a multiple of 128."""
    values, scales = reference_quantise(x)
    rows = values.float() * scales.T.repeat_interleave(BLOCK, 1)
    return (rows @ weight.dequantised(torch.float32).T).to(out_dtype)


def _blocks(part: range, what: str) -> tuple[int, int]:
    if part.start % BLOCK:
        raise ValueError(f"{what} {part.start} to {part.stop} do not begin with a block of {BLOCK}")
    return part.start // BLOCK, -(-part.stop // BLOCK)
