"""Draws tokens on any device, all rows of a block at once. On a CPU ``draw_host.py`` does the same faster.

Both keep the tokens that ``min_p``, then ``top_k``, then ``top_p`` on what is left allow (tokens that tie
with the last one kept are kept too), and look up one uniform number of the counter-based generator at (seed,
position) in their cumulative distribution in order of token id, in float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from interlock.engine.batch import SamplingRows
from interlock.engine.philox import uniforms
from interlock.engine.upload import upload

NUCLEUS_SIZES = (128, 2048)

Int64s = npt.NDArray[np.int64]


def draw(logits: torch.Tensor, sampling: SamplingRows, rows: Int64s) -> torch.Tensor:
    """Draw from float32 logits [r, V], which belong to the rows ``rows`` of the batch -> int64 [r]."""

    def column(values: npt.NDArray[np.float64] | npt.NDArray[np.float32], dtype: torch.dtype) -> torch.Tensor:
        return upload(values, logits.device).to(dtype)[:, None]

    logits = (logits - logits.amax(dim=-1, keepdim=True)) / column(sampling.temperature[rows], logits.dtype)
    min_p, top_k, top_p = sampling.min_p[rows], sampling.top_k[rows], sampling.top_p[rows]
    if (min_p > 0).any():
        floor = np.log(np.maximum(min_p, np.finfo(np.float64).tiny))
        floor[min_p <= 0] = -np.inf
        logits.masked_fill_(logits < column(floor, logits.dtype), -torch.inf)
    limited = np.flatnonzero((top_k > 0) & (top_k < logits.shape[1]))
    if len(limited):
        index = torch.from_numpy(limited).to(logits.device)
        logits[index] = _keep_top_k(logits[index], top_k[limited])
    weights = torch.exp(logits)
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    truncated = np.flatnonzero(top_p < 1.0)
    if len(truncated):
        index = torch.from_numpy(truncated).to(logits.device)
        wanted = column(top_p[truncated], torch.float64) * cumulative[index, -1:]
        part = weights[index]
        part = part.masked_fill(part < _nucleus_floor(part, wanted), 0.0)
        cumulative[index] = torch.cumsum(part, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    target = column(uniforms(sampling.seed[rows], sampling.positions[rows]), torch.float64) * total
    drawn = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(drawn, last)[:, 0].clamp(max=logits.shape[1] - 1)


def _keep_top_k(logits: torch.Tensor, top_k: Int64s) -> torch.Tensor:
    """Rows [r, V] with everything below each row's k-th largest entry at minus infinity."""
    best = torch.topk(logits, int(top_k.max()), dim=-1).values
    floor = best.gather(1, torch.from_numpy(top_k - 1).to(logits.device)[:, None])
    return logits.masked_fill(logits < floor, -torch.inf)


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
