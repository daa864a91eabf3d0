"""Draws one token a row, in torch; see ``Kernels.draw`` for what it means."""

from __future__ import annotations

import torch

NUCLEUS_SIZES = (128, 2048)


def draw(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """See ``Kernels.draw``."""
    width = logits.shape[1]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    weights = torch.exp(scaled)
    weights = weights.masked_fill(weights < min_p[:, None].float(), 0.0)
    limited = ((top_k > 0) & (top_k < width)).nonzero()[:, 0]
    if len(limited):
        below = logits[limited] < _kth_largest(logits[limited], top_k[limited])
        weights[limited] = weights[limited].masked_fill(below, 0.0)
    truncated = (top_p < 1.0).nonzero()[:, 0]
    if len(truncated):
        part = weights[truncated]
        wanted = top_p[truncated, None] * part.sum(dim=-1, keepdim=True, dtype=torch.float64)
        weights[truncated] = part.masked_fill(part < _nucleus_floor(part, wanted), 0.0)
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(drawn, last)[:, 0].clamp(max=width - 1)


def _kth_largest(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[r, 1]."""
    best = torch.topk(logits, int(top_k.max()), dim=-1).values
    return best.gather(1, (top_k - 1)[:, None])


def _nucleus_floor(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The smallest weight [r, 1] of each row's smallest set of largest weights that adds up to ``wanted``.

    Only as many of the largest weights are sorted as are needed; the result does not depend on how many.
    """
    floor = torch.zeros_like(weights[:, :1])
    open_rows = torch.arange(len(weights), device=weights.device)
    for size in (*NUCLEUS_SIZES, weights.shape[1]):
        size = min(size, weights.shape[1])
        best = torch.topk(weights[open_rows], size, dim=-1).values
        sums = torch.cumsum(best, dim=-1, dtype=torch.float64)
        index = torch.searchsorted(sums, wanted[open_rows])
        done = (
            (index < size)[:, 0]
            if size < weights.shape[1]
            else torch.ones_like(index[:, 0], dtype=torch.bool)
        )
        found = best.gather(1, index.clamp(max=size - 1))
        floor[open_rows[done]] = found[done]
        open_rows = open_rows[~done]
        if not len(open_rows):
            break
    return floor
