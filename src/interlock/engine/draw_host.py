"""Draws tokens on the host, touching the vocabulary as few times as possible.

The meaning is that of ``draw.py``. Every operation is row by row, so rows do not depend on each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from interlock.engine.batch import SamplingRows
from interlock.engine.philox import uniforms

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

BLOCK = 256
"""Weights whose sum is looked up together; rows shorter than 16 blocks are summed token by token."""


def draw_host(logits: Float32s, sampling: SamplingRows, rows: Int64s) -> Int64s:
    """Draw from float32 logits [r, V], which belong to the rows ``rows`` of the batch -> int64 [r]."""
    weights = logits - logits.max(axis=1, keepdims=True)
    weights /= sampling.temperature[rows, None]
    np.exp(weights, out=weights)
    top_k, top_p, min_p = sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows]
    for row in np.flatnonzero((top_k > 0) | (top_p < 1.0) | (min_p > 0)).tolist():
        _truncate(weights[row], logits[row], float(min_p[row]), int(top_k[row]), float(top_p[row]))
    return _look_up(weights, uniforms(sampling.seed[rows], sampling.positions[rows]))


def _truncate(weights: Float32s, logits: Float32s, min_p: float, top_k: int, top_p: float) -> None:
    """Set the weights [V] of tokens that are not kept to zero; the largest weight is 1."""
    if min_p > 0:
        weights[weights < min_p] = 0
    if 0 < top_k < len(logits):
        weights[logits < _kth_largest(logits, top_k)] = 0
    if top_p < 1.0:
        weights[weights < _nucleus_floor(weights, top_p)] = 0


def _kth_largest(values: Float32s, k: int) -> np.float32:
    """The k-th largest value. Every one of the k blocks with the largest maxima holds a value as large as
    the smallest of these maxima, so smaller values need not be looked at."""
    blocks = len(values) // BLOCK
    if k <= blocks:
        maxima = values[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        values = values[values >= np.partition(maxima, -k)[-k]]
    largest: np.float32 = np.partition(values, -k)[-k]
    return largest


def _nucleus_floor(weights: Float32s, top_p: float) -> np.float32:
    """The smallest weight of the smallest set of largest weights that holds ``top_p`` of the total.

    All weights of at most (1 - top_p) * total / V together hold at most 1 - top_p of the total, so only
    larger ones are sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    largest = np.sort(weights[weights > (1.0 - top_p) * total / len(weights)])[::-1]
    if not len(largest):
        return np.float32(0)
    sums = np.cumsum(largest, dtype=np.float64)
    smallest: np.float32 = largest[min(int(np.searchsorted(sums, top_p * total)), len(largest) - 1)]
    return smallest


def _look_up(weights: Float32s, uniform: Float64s) -> Int64s:
    """First index of each row [V] at which the cumulative sum exceeds ``uniform`` [r] times the total."""
    rows, width = weights.shape
    blocks = width // BLOCK
    if blocks < 16:
        ends = np.cumsum(weights, axis=1, dtype=np.float64)
        return _first_above(ends, uniform * ends[:, -1])
    whole = blocks * BLOCK
    sums = np.zeros((rows, blocks + 1), dtype=np.float64)
    weights[:, :whole].reshape(rows, blocks, BLOCK).sum(axis=2, dtype=np.float64, out=sums[:, :blocks])
    sums[:, blocks] = weights[:, whole:].sum(axis=1, dtype=np.float64)
    ends = np.cumsum(sums, axis=1)
    target = uniform * ends[:, -1]
    block = _first_above(ends, target)
    each = np.arange(rows)
    rest = target - np.where(block > 0, ends[each, block - 1], 0.0)
    members = block[:, None] * BLOCK + np.arange(BLOCK)
    part = np.where(members < width, weights[each[:, None], np.minimum(members, width - 1)], 0.0)
    return block * BLOCK + _first_above(np.cumsum(part, axis=1, dtype=np.float64), rest)


def _first_above(ends: Float64s, target: Float64s) -> Int64s:
    """First index of each row of cumulative sums ``ends`` [r, N] that exceeds ``target`` [r]; the last index
    that adds to the sum where rounding lets none exceed it."""
    above: Int64s = (ends <= target[:, None]).sum(axis=1)
    last: Int64s = (ends < ends[:, -1:]).sum(axis=1)
    return np.minimum(above, last)
