"""Tables of cosines and sines for rotary positions."""

from __future__ import annotations

import torch


def cos_sin_table(*, theta: float, rotary_dim: int, positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, rotary_dim]: cos of the rotary_dim / 2 angles, then their sin.

    angle = position * theta^(-2j / rotary_dim): frequencies are spread over the rotated channels, not over
    the whole head. Angles are computed in float64, so that late positions keep their precision.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-exponent
    return torch.cat([angles.cos(), angles.sin()], -1).to(torch.float32).to(device)


class RopeTables:
    """One table for each (base, rotated channels) in a model; layers with the same pair share it."""

    def __init__(self, positions: int, device: torch.device) -> None:
        self._positions, self._device = positions, device
        self._tables: dict[tuple[float, int], torch.Tensor] = {}

    def get(self, theta: float, rotary_dim: int) -> torch.Tensor:
        key = (theta, rotary_dim)
        if key not in self._tables:
            self._tables[key] = cos_sin_table(
                theta=theta, rotary_dim=rotary_dim, positions=self._positions, device=self._device
            )
        return self._tables[key]
