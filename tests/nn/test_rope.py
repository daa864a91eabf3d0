"""Rotary tables."""

from __future__ import annotations

import math

import pytest
import torch

from interlock.nn.rope import RopeTables, cos_sin_table

CPU = torch.device("cpu")


@pytest.mark.parametrize("position", [0, 1, 1000])
def test_frequencies_are_spread_over_the_rotated_channels(position: int) -> None:
    """E13: head size 24, factor 0.334 -> 8 channels with theta^(-2j/8), not theta^(-2j/24)."""
    rotary = int(24 * 0.334)
    table = cos_sin_table(theta=1e4, rotary_dim=rotary, positions=1001, device=CPU)
    assert table.shape == (1001, 8)
    for j in range(4):
        angle = position * 1e4 ** (-2 * j / 8)
        assert float(table[position, j]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(table[position, 4 + j]) == pytest.approx(math.sin(angle), abs=1e-6)


def test_late_positions_keep_their_precision() -> None:
    position = 200_000
    table = cos_sin_table(theta=1e7, rotary_dim=64, positions=position + 1, device=CPU)[position]
    for j in range(32):
        angle = math.fmod(position * 1e7 ** (-2 * j / 64), 2 * math.pi)
        assert float(table[j]) == pytest.approx(math.cos(angle), abs=2e-6)


def test_layers_with_the_same_base_share_a_table() -> None:
    tables = RopeTables(8, CPU)
    assert tables.get(1e4, 8) is tables.get(1e4, 8)
    assert tables.get(1e4, 8) is not tables.get(1e7, 8)
