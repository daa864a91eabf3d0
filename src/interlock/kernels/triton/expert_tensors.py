"""The weights of the experts of one layer, as the GPU kernels read them. No Triton here."""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 128
"""Channels that share a scale: a side of a weight block, and the length of an activation group."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Weights as the GEMMs read them.

    Attributes:
        gate_up: [E, 2i, h], gate rows first; bfloat16 or e4m3.
        down: [E, h, i].
        gate_up_scales: float32 [E, 2i / 128, h / 128] for e4m3, else None.
        down_scales: float32 [E, h / 128, i / 128] for e4m3, else None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None

    @property
    def fp8(self) -> bool:
        return self.gate_up_scales is not None

    @property
    def nbytes(self) -> int:
        parts = (self.gate_up, self.down, self.gate_up_scales, self.down_scales)
        return sum(part.nbytes for part in parts if part is not None)


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] float -> (e4m3 [..., N, K], float32 scales [..., ceil(N / 128), ceil(K / 128)]).

    scale = max |block| / 448. A weight that was dequantised from such blocks comes back exactly where the
    largest value of a block was stored as 448, which is how checkpoints are made.
    """
    rows, columns = weight.shape[-2:]
    pad_rows, pad_columns = -rows % GROUP, -columns % GROUP
    padded = torch.nn.functional.pad(weight.float(), (0, pad_columns, 0, pad_rows))
    tiles = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    scale = tiles.abs().amax((-3, -1), keepdim=True).clamp_min(1e-12) / 448.0
    values = (tiles / scale).clamp(-448, 448).flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scale[..., 0, :, 0].contiguous()


def pad_width(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [E, 2i, h], down [E, h, i] with i padded by zeros to a multiple of 128: the results are the
    same."""
    inter = down.shape[2]
    extra = -inter % GROUP
    if extra == 0:
        return gate_up, down
    gate, up = gate_up.split(inter, dim=1)
    pad = torch.nn.functional.pad
    wide = torch.cat((pad(gate, (0, 0, 0, extra)), pad(up, (0, 0, 0, extra))), dim=1)
    return wide, pad(down, (0, extra))
