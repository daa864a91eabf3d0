"""The requests that take part in steps: those in prefill, those in decode, and the rows of a decode step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from interlock.engine.batch import Int64s
from interlock.engine.request import Request, State
from interlock.engine.sequence_pages import SequencePages
from interlock.kv.prefix_tree import Node


class Admitted:
    """Requests with a row of the slot table and pages, but for those in ``Reception`` and ``Departures``."""

    def __init__(self, pages: SequencePages) -> None:
        self._pages = pages
        self._table = pages.table
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}
        self._decode_rows: tuple[tuple[Request, ...], Int64s] | None = None

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def __iter__(self) -> Iterator[Request]:
        yield from self._prefilling
        yield from self._decoding

    @property
    def prefilling(self) -> tuple[Request, ...]:
        return tuple(self._prefilling)

    @property
    def decoding(self) -> int:
        """How many requests are in decode."""
        return len(self._decoding)

    @property
    def uncomputed_tokens(self) -> int:
        """Known tokens of requests in prefill whose keys and values are not in the cache."""
        table = self._table
        return sum(int(table.length[r.slot] - table.computed[r.slot]) for r in self._prefilling)

    def decode_rows(self) -> tuple[tuple[Request, ...], Int64s]:
        """The requests in decode and their slots, int64, in the order of a decode step's rows."""
        if self._decode_rows is None:
            requests = tuple(self._decoding)
            self._decode_rows = requests, np.array([r.slot for r in requests], dtype=np.int64)
        return self._decode_rows

    def enter(self, request: Request, path: list[Node]) -> None:
        """Give the request a row and the cached prefix ``path``; its prefill begins."""
        request.enter(self._table, self._table.take_row())
        self._pages.adopt(request, path)
        request.state = State.PREFILLING
        self._prefilling[request] = None

    def decode(self, request: Request) -> None:
        """All known tokens but the last of the request are in the cache: it goes on in decode steps."""
        self._prefilling.pop(request, None)
        request.state = State.DECODING
        self._decoding[request] = None
        self._decode_rows = None

    def forget(self, request: Request) -> None:
        """The request takes part in no further step; it keeps its row and pages."""
        self._prefilling.pop(request, None)
        if self._decoding.pop(request, self) is None:
            self._decode_rows = None

    def leave(self, request: Request, *, spoilt: bool = False) -> None:
        """Take the request out of the table and let go of its pages. ``spoilt``: what only it has published
        to the prefix cache is dropped too."""
        slot = request.slot
        self._pages.release(request, spoilt=spoilt)
        request.leave()
        self._table.give_row(slot)
        self.forget(request)
