"""What to copy: from a range of tokens and the page tables of both servers to pieces of bytes.

Everything is reckoned in tokens, so page sizes may differ: a piece ends where either side's page ends, and
never reaches beyond the last token. Heads have global numbers, so a buffer is found by (layer, kind) and a
head by its number, whatever the two servers' ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from interlock.kv.pages import Int32s
from interlock.kv.transfer.base import Int64s, Pieces, TransferError
from interlock.kv.transfer.layout import ELEMENT_BYTES, CacheLayout
from interlock.parallel.sharding import kv_heads_of


@dataclass(frozen=True, slots=True)
class Heads:
    """Consecutive global heads that one rank sends to another."""

    sender: int
    receiver: int
    heads: range


def head_routes(kv_heads: int, senders: int, receivers: int) -> Iterator[Heads]:
    """Who sends which heads to whom: every receiver gets each of its heads from exactly one sender.

    Where senders outnumber heads and hold copies, receivers are spread over the copies.
    """
    holders: dict[int, list[int]] = {}
    for sender in range(senders):
        for head in kv_heads_of(kv_heads, senders, sender):
            holders.setdefault(head, []).append(sender)
    for receiver in range(receivers):
        start = None
        wanted = kv_heads_of(kv_heads, receivers, receiver)
        chosen = [holders[head][receiver % len(holders[head])] for head in wanted]
        for index, sender in enumerate(chosen):
            start = index if start is None else start
            if index + 1 == len(chosen) or chosen[index + 1] != sender:
                yield Heads(sender, receiver, range(wanted[start], wanted[index] + 1))
                start = None


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start : end`` of a sequence in one page space, and both servers' pages by page index.

    Pages are int32; entries that the span does not touch may be -1.
    """

    start: int
    end: int
    source: Int32s
    target: Int32s


class CopyPlanner:
    """Pieces that rank ``sender`` of a prefill replica writes to rank ``receiver`` of a decode replica."""

    def __init__(self, prefill: CacheLayout, decode: CacheLayout, *, sender: int, receiver: int) -> None:
        self._prefill = prefill
        self._decode = decode
        places = {(layer.layer, kind): i for i, (layer, kind) in enumerate(decode.buffers)}
        self._strips: dict[bool, list[_Strip]] = {True: [], False: []}
        for index, (layer, kind) in enumerate(prefill.buffers):
            for route in head_routes(layer.kv_heads, prefill.attn_tp, decode.attn_tp):
                if (route.sender, route.receiver) != (sender, receiver):
                    continue
                unit = layer.width(kind) * ELEMENT_BYTES[prefill.dtype]
                first = kv_heads_of(layer.kv_heads, prefill.attn_tp, sender).start
                other = kv_heads_of(layer.kv_heads, decode.attn_tp, receiver).start
                strip = _Strip(
                    source_buffer=index,
                    target_buffer=places[layer.layer, kind],
                    source_row=prefill.row_bytes(layer, kind),
                    target_row=decode.row_bytes(layer, kind),
                    source_offset=(route.heads.start - first) * unit,
                    target_offset=(route.heads.start - other) * unit,
                    nbytes=len(route.heads) * unit,
                )
                self._strips[layer.window is not None].append(strip)

    @property
    def is_empty(self) -> bool:
        """The two ranks share no head."""
        return not any(self._strips.values())

    def pieces(self, full: Span | None, window: Span | None) -> Pieces:
        """The pieces of both spaces.

        Raises:
            TransferError: a page that the spans need does not exist.
        """
        parts: list[tuple[Int64s, ...]] = []
        for span, strips, total, other in (
            (full, self._strips[False], self._prefill.full_pages, self._decode.full_pages),
            (window, self._strips[True], self._prefill.window_pages, self._decode.window_pages),
        ):
            if span is None or span.end <= span.start or not strips:
                continue
            source = _rows(span.start, span.end, span.source, self._prefill.page_size, total)
            target = _rows(span.start, span.end, span.target, self._decode.page_size, other)
            order = np.argsort(source, kind="stable")
            source, target = source[order], target[order]
            runs = _runs(source, target)
            parts += [strip.cut(source, target, runs) for strip in strips]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
        return Pieces(*(columns or [np.zeros(0, dtype=np.int64)] * 8))


@dataclass(frozen=True, slots=True)
class _Strip:
    """The heads of one buffer that go to one buffer: ``nbytes`` of every token's row."""

    source_buffer: int
    target_buffer: int
    source_row: int
    target_row: int
    source_offset: int
    target_offset: int
    nbytes: int

    def cut(self, source: Int64s, target: Int64s, runs: Int64s) -> tuple[Int64s, ...]:
        """Columns of the ``Pieces`` of runs of tokens: one for each run, whole rows as one line."""
        tokens = np.diff(np.append(runs, len(source)))
        source, target = source[runs], target[runs]
        whole = self.nbytes == self.source_row == self.target_row
        every = np.ones(len(runs), dtype=np.int64)
        return (
            every * self.source_buffer,
            source * self.source_row + self.source_offset,
            every * self.target_buffer,
            target * self.target_row + self.target_offset,
            (tokens if whole else every) * self.nbytes,
            every if whole else tokens,
            every * self.source_row,
            every * self.target_row,
        )


def _rows(start: int, end: int, pages: Int32s, size: int, total: int) -> Int64s:
    """Row of each token in a buffer of ``total`` pages."""
    if start < 0 or (end - 1) // size >= len(pages):
        raise TransferError(f"tokens {start}:{end} need {-(-end // size)} pages and {len(pages)} are named")
    tokens = np.arange(start, end, dtype=np.int64)
    held = pages[tokens // size].astype(np.int64)
    if held.min() < 0 or held.max() >= total:
        raise TransferError(f"tokens {start}:{end} are on a page outside 0:{total}")
    return held * size + tokens % size


def _runs(source: Int64s, target: Int64s) -> Int64s:
    """Where runs of tokens begin that lie side by side on both sides."""
    breaks = (np.diff(source) != 1) | (np.diff(target) != 1)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.flatnonzero(breaks) + 1])
