"""Rows quantised to fp8, as tensors: launches of the kernels in ``quantise``."""

from __future__ import annotations

import torch

from interlock.kernels.triton import quantise
from interlock.kernels.triton.expert_tensors import GROUP

GROUPS_A_PROGRAM = 8


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, h] -> (e4m3 [n, h], float32 scales [h / 128, n])."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=x.device)
    if rows:
        groups = GROUPS_A_PROGRAM
        quantise.quantise_kernel[(rows, -(-width // (GROUP * groups)))](
            x, out, scales, rows, x.stride(0), width, groups, rows, num_warps=4
        )
    return out, scales


def quantise_to_places(
    x: torch.Tensor, place_of_lane: torch.Tensor, places: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, h], place_of_lane int32 [n, k] -> (e4m3 [P, h], scales [h / 128, P]) in order of places.

    P is ``places``, n * k by default; rows that no lane names are undefined.
    """
    (tokens, width), k = x.shape, place_of_lane.shape[1]
    places = tokens * k if places is None else places
    out = torch.empty(places, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width // GROUP, places, dtype=torch.float32, device=x.device)
    if tokens:
        groups = GROUPS_A_PROGRAM
        quantise.quantise_to_places_kernel[(tokens, -(-width // (GROUP * groups)))](
            x, place_of_lane, out, scales, x.stride(0), k, width, groups, places, num_warps=4
        )
    return out, scales
