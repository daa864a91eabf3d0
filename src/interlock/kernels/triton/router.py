"""The router on a GPU: logits through the matrix units at float32 accuracy, then the choice in one kernel.

Nothing synchronises with the host and all shapes follow from the input's, so it can be captured in a CUDA
graph. What it must compute: ``moe/routing.py``.

Legend: n tokens, k experts a token, E experts, h hidden size, p parts of the weight.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.kernels.triton import lanes
from interlock.kernels.triton.row_blocks import power_of_two

MAX_PARTS = 3
"""A float32 weight of 24 bits is the sum of three bfloat16 of 8 bits."""


@dataclass(frozen=True, slots=True)
class RouterWeight:
    """bfloat16 [p * E, h] whose p blocks of E rows add up to the weight."""

    blocks: torch.Tensor
    parts: int


def pack_router(weight: torch.Tensor) -> RouterWeight:
    """weight [E, h] float32 or bfloat16 -> as few bfloat16 parts as hold it exactly, at most three."""
    parts: list[torch.Tensor] = []
    rest = weight.float()
    while len(parts) < MAX_PARTS:
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
        if not bool(rest.any()):
            break
    return RouterWeight(torch.cat(parts).contiguous(), len(parts))


def part_logits(hidden: torch.Tensor, weight: RouterWeight) -> torch.Tensor:
    """hidden bfloat16 [n, h] -> float32 [n, p * E]; the logits are the sum of the p blocks of columns.

    Products of bfloat16 are exact in float32, so the parts cost matrix work but no accuracy.
    """
    if hidden.is_cuda:
        return torch.mm(hidden, weight.blocks.T, out_dtype=torch.float32)
    return hidden.float() @ weight.blocks.float().T


def sum_parts(logits: torch.Tensor, parts: int) -> torch.Tensor:
    """float32 [n, p * E] -> [n, E], added in the order of the parts as ``top_k`` does."""
    blocks = logits.chunk(parts, dim=1)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


def top_k(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    *,
    sigmoid: bool,
    normalise: bool,
    scaling: float = 1.0,
    parts: int = 1,
    live_tokens: int | None = None,
    live_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [n, p * E], bias float32 [E] -> (ids int64 [n, k] ascending, weights float32 [n, k]).

    Rows at and beyond ``live_tokens`` (all are live by default), or beyond ``live_count`` int32 [1] on the
    device, get ids -1 and weights 0.
    """
    tokens, experts = logits.shape[0], logits.shape[1] // parts
    ids = torch.empty(tokens, k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    if tokens:
        lanes.top_k_kernel[(tokens,)](
            logits, bias, live_count, ids, weights, experts, logits.stride(0),
            tokens if live_tokens is None else live_tokens, scaling,
            top_k=k, slots=power_of_two(k), width=power_of_two(experts), parts=parts, sigmoid=sigmoid,
            has_bias=bias is not None, has_live=live_count is not None, normalise=normalise,
            num_warps=1 if experts <= 256 else 4,
        )  # fmt: skip
    return ids, weights
