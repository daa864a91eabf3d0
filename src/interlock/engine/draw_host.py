"""Draws the token of one row on the host, touching the whole vocabulary as few times as possible.

The meaning is that of ``draw.py``. Rows are independent by construction.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]

BLOCK = 256
"""Weights whose sum is looked up together; rows shorter than 16 blocks are summed token by token."""


def draw_row(
    logits: Float32s, *, temperature: float, min_p: float, top_k: int, top_p: float, uniform: float
) -> int:
    """The token of float32 logits [V] for the number ``uniform`` in [0, 1)."""
    best = logits.max()
    floor = -math.inf
    if min_p > 0:
        floor = float(best) + temperature * math.log(min_p)
    if 0 < top_k < len(logits):
        floor = max(floor, _kth_largest(logits, top_k))
    ids = None
    if floor > -math.inf:
        ids = np.flatnonzero(logits >= floor)
        logits = logits[ids]
    weights = np.exp((logits - best) / np.float32(temperature))
    if top_p < 1.0:
        kept = np.flatnonzero(weights >= _nucleus_floor(weights, top_p))
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    index = _look_up(weights, uniform)
    return index if ids is None else int(ids[index])


def _kth_largest(values: Float32s, k: int) -> float:
    """The k-th largest value. Every one of the k blocks with the largest maxima holds a value as large as
    the smallest of these maxima, so smaller values need not be looked at."""
    blocks = len(values) // BLOCK
    if k <= blocks:
        maxima = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        values = values[values >= np.partition(maxima, -k)[-k]]
    return float(np.partition(values, -k)[-k])


def _nucleus_floor(weights: Float32s, top_p: float) -> np.float32:
    """The smallest weight of the smallest set of largest weights that holds ``top_p`` of the total.

    All weights of at most (1 - top_p) * total / n together hold at most 1 - top_p of the total, so only
    larger ones are sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    largest = np.sort(weights[weights > (1.0 - top_p) * total / len(weights)])[::-1]
    if not len(largest):
        return np.float32(0)
    sums = np.cumsum(largest, dtype=np.float64)
    index = min(int(np.searchsorted(sums, top_p * total)), len(largest) - 1)
    smallest: np.float32 = largest[index]
    return smallest


def _look_up(weights: Float32s, uniform: float) -> int:
    """First index at which the cumulative sum exceeds ``uniform`` times the total."""
    blocks = len(weights) // BLOCK
    if blocks < 16:
        ends = np.cumsum(weights, dtype=np.float64)
        return _first_above(ends, uniform * float(ends[-1]))
    whole = blocks * BLOCK
    sums = np.zeros(blocks + 1, dtype=np.float64)
    weights[:whole].reshape(blocks, BLOCK).sum(axis=1, dtype=np.float64, out=sums[:blocks])
    sums[blocks] = weights[whole:].sum(dtype=np.float64)
    ends = np.cumsum(sums)
    target = uniform * float(ends[-1])
    block = min(int(np.searchsorted(ends, target, side="right")), int(np.flatnonzero(sums)[-1]))
    start = block * BLOCK
    rest = target - (float(ends[block - 1]) if block else 0.0)
    return start + _first_above(np.cumsum(weights[start : start + BLOCK], dtype=np.float64), rest)


def _first_above(ends: npt.NDArray[np.float64], target: float) -> int:
    """First index at which the cumulative sums ``ends`` exceed ``target``; the last index that adds to them
    where rounding lets none exceed it."""
    index = int(np.searchsorted(ends, target, side="right"))
    return min(index, int(np.searchsorted(ends, ends[-1])))
