"""Pieces cut into parts that fit a slot of staging memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from interlock.kv.transfer.base import Int64s, Pieces


def parts(pieces: Pieces, limit: int, grain: int) -> Iterator[Pieces]:
    """The same bytes in the same order, at most ``limit`` in each part.

    Args:
        grain: pieces are cut to at most so many bytes, and to ``limit``.
    """
    small = split(pieces, min(grain, limit))
    ends = np.cumsum(small.length * small.rows)
    start, base = 0, 0
    while start < len(small):
        stop = int(np.searchsorted(ends, base + limit, side="right"))
        yield _take(small, slice(start, stop))
        start, base = stop, int(ends[stop - 1])


def split(pieces: Pieces, most: int) -> Pieces:
    """The same bytes in pieces of at most ``most``."""
    pieces = _split_rows(pieces, most)
    cuts = np.maximum(-(-pieces.length // most), 1)
    if (cuts == 1).all():
        return pieces
    index, number = _repeated(cuts)
    each = _take(pieces, index)
    offset = number * most
    return _changed(each, offset, offset, length=np.minimum(each.length - offset, most))


def _split_rows(pieces: Pieces, most: int) -> Pieces:
    fit = np.maximum(most // np.maximum(pieces.length, 1), 1)
    cuts = np.maximum(-(-pieces.rows // fit), 1)
    if (cuts == 1).all():
        return pieces
    index, number = _repeated(cuts)
    each = _take(pieces, index)
    first = number * fit[index]
    rows = np.minimum(each.rows - first, fit[index])
    return _changed(each, first * each.source_stride, first * each.target_stride, rows=rows)


def _repeated(count: Int64s) -> tuple[Int64s, Int64s]:
    """Index of the piece, and number within it, of each of ``count[i]`` copies of piece i."""
    index = np.repeat(np.arange(len(count), dtype=np.int64), count)
    return index, np.arange(len(index), dtype=np.int64) - (np.cumsum(count) - count)[index]


def _take(pieces: Pieces, which: Int64s | slice) -> Pieces:
    return Pieces(**{each.name: getattr(pieces, each.name)[which] for each in fields(Pieces)})


def _changed(
    each: Pieces,
    source: Int64s,
    target: Int64s,
    *,
    length: Int64s | None = None,
    rows: Int64s | None = None,
) -> Pieces:
    return Pieces(
        each.source_buffer,
        each.source + source,
        each.target_buffer,
        each.target + target,
        each.length if length is None else length,
        each.rows if rows is None else rows,
        each.source_stride,
        each.target_stride,
    )
