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
from interlock.kernels.triton.compile_ahead import rehearsing
from interlock.kernels.triton.row_blocks import power_of_two

MAX_PARTS = 3
"""A float32 weight of 24 bits is the sum of three bfloat16 of 8 bits."""
FEW_TOKENS = 32
"""Tokens up to which our own kernel is used: the vendor's library needs two launches for so few."""
DEPTH_A_PROGRAM, EXPERTS_A_PROGRAM = 512, 4


@dataclass(frozen=True, slots=True)
class RouterWeight:
    """The weight [E, h] twice: as it is, for few tokens, and in parts for the matrix units.

    Attributes:
        whole: float32 or bfloat16 [E, h].
        blocks: bfloat16 [p * E, h] whose p blocks of E rows add up to the weight.
    """

    whole: torch.Tensor
    blocks: torch.Tensor
    parts: int

    @property
    def splits(self) -> int:
        """Shares of the depth that few tokens are computed in."""
        return -(-self.whole.shape[1] // DEPTH_A_PROGRAM)


@dataclass(frozen=True, slots=True)
class PartLogits:
    """float32 [n, p * E]: logits are the sum of the p blocks of columns, added in order."""

    values: torch.Tensor
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
    return RouterWeight(weight.contiguous(), torch.cat(parts).contiguous(), len(parts))


def part_logits(hidden: torch.Tensor, weight: RouterWeight) -> PartLogits:
    """hidden bfloat16 [n, h] -> logits in parts: of the depth for few tokens, else of the weight.

    Products of bfloat16 are exact in float32, so parts of the weight cost matrix work but no accuracy.
    """
    tokens = hidden.shape[0]
    if 0 < tokens <= FEW_TOKENS:
        return _few_logits(hidden, weight)
    if hidden.is_cuda:
        return PartLogits(torch.mm(hidden, weight.blocks.T, out_dtype=torch.float32), weight.parts)
    return PartLogits(hidden.float() @ weight.blocks.float().T, weight.parts)


def _few_logits(hidden: torch.Tensor, weight: RouterWeight) -> PartLogits:
    tokens, (experts, depth) = hidden.shape[0], weight.whole.shape
    splits = weight.splits
    logits = torch.empty(tokens, splits * experts, dtype=torch.float32, device=hidden.device)
    lanes.few_logits_kernel[(-(-experts // EXPERTS_A_PROGRAM), splits)](
        hidden, weight.whole, logits, tokens, hidden.stride(0),
        depth=depth, experts=experts, splits=splits, block_e=EXPERTS_A_PROGRAM, chunk=DEPTH_A_PROGRAM,
        width=DEPTH_A_PROGRAM, num_warps=1, **_early(hidden),
    )  # fmt: skip
    return PartLogits(logits, splits)


def sum_parts(logits: PartLogits) -> torch.Tensor:
    """-> float32 [n, E], added in the order of the parts as ``top_k`` does."""
    blocks = logits.values.chunk(logits.parts, dim=1)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


def count_lanes(ids: torch.Tensor, counts: torch.Tensor) -> None:
    """counts int64 [E + 1] grows: ``counts[i + 1]`` by the lanes of ids int64 that name i (-1 included)."""
    block = 256
    lanes.count_lanes_kernel[(-(-ids.numel() // block),)](ids, counts, ids.numel(), block=block, num_warps=4)


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
            num_warps=1 if experts <= 256 else 4, **_early(logits),
        )  # fmt: skip
        if rehearsing():
            ids.copy_(spread(tokens, k, experts))
    return ids, weights


def spread(tokens: int, k: int, experts: int) -> torch.Tensor:
    """ids int64 [tokens, k], distinct and ascending in a row, evenly over the experts: what a rehearsal takes
    for the choice, so that each rank is sent some lanes and meets the kernels that compute them."""
    number = torch.arange(tokens * k)
    ids = number * experts // len(number) if len(number) <= experts else number % experts
    return ids.view(tokens, k).sort(dim=1).values


def _early(x: torch.Tensor) -> dict[str, bool]:
    """Options of a launch that may start before the one in front of it ends (dependent launch)."""
    return {"early": True, "launch_pdl": True} if x.is_cuda else {"early": False}
