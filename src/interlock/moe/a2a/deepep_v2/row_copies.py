"""Copies of received rows to the places of their lanes: one Triton program a lane, plain torch on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """rows [R, h], weights float32 [R], scales float32 [R, h / 128] or None."""

    rows: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None


def copy_lanes(
    slots: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    target: Target,
) -> None:
    """Row n goes to every ``slots[n, j]`` that is not -1, with ``weights[n, j]`` and its scales.

    Args:
        slots: int32 [N, k]. rows [N, h]. weights: float32 [N, k]. scales: float32 [N, h / 128].
    """
    if slots.numel() == 0:
        return
    if rows.device.type == "cuda":
        from interlock.moe.a2a.deepep_v2.row_copies_triton import launch

        launch(slots, rows, weights, scales, target)
        return
    source, lane = (slots >= 0).nonzero(as_tuple=True)
    at = slots[source, lane].long()
    target.rows.view(torch.uint8)[at] = rows.view(torch.uint8)[source]
    target.weights[at] = weights[source, lane]
    if scales is not None and target.scales is not None:
        target.scales[at] = scales[source]
