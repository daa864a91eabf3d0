"""When the head of the waiting queue may start: its pages beside those that admitted requests will need."""

from __future__ import annotations

import numpy as np

from interlock.engine.admitted import Admitted
from interlock.engine.reception import Reception
from interlock.engine.request import Request
from interlock.engine.sequence_pages import SequencePages
from interlock.kv.prefix_tree import Node

BLOCKED_RETRY_STEPS = 8


class AdmissionPolicy:
    """Finds the cached prefix of a request and decides whether there is room for the rest.

    Args:
        chunk_size: most tokens of a prefill step.
        max_model_len: most tokens of a request.
    """

    def __init__(
        self,
        pages: SequencePages,
        admitted: Admitted,
        reception: Reception,
        *,
        chunk_size: int,
        max_model_len: int,
    ) -> None:
        self._table = pages.table
        self._store = pages.store
        self._geometry = pages.geometry
        self._admitted = admitted
        self._reception = reception
        self._chunk_size = chunk_size
        self._longest_window = pages.geometry.window_pages_for(max_model_len, 1)
        self._blocked: tuple[Request, int, int] | None = None
        self._steps = 0

    def next_step(self) -> None:
        """A step is scheduled; a request that was found too large is looked at again after some."""
        self._steps += 1

    def reconsider(self) -> None:
        """Look again at the request that was found too large."""
        self._blocked = None

    def prefix_to_admit(self, head: Request) -> list[Node] | None:
        """The cached prefix to admit ``head`` on, or None while there is no room for it.

        Room: its pages fit beside what requests in prefill still need and one page for each decoding
        request that grows; in the window space also a chunk, or a quarter of the space where that is less
        (a chunk is cut to the pages there are). When nobody is admitted it always has room.
        """
        alone = not len(self._admitted) and not len(self._reception)
        if not alone and self._still_blocked(head):
            return None
        path = self._store.match(head.tokens, head.reusable_tokens)
        if alone or self._has_room(head, path):
            return path
        self._blocked = (head, self._store.available(), self._steps)
        return None

    def _still_blocked(self, head: Request) -> bool:
        """Whether ``head`` was found too large lately and no pages have come free since."""
        if self._blocked is None:
            return False
        request, available, step = self._blocked
        return (
            request is head
            and self._store.available() <= available
            and self._steps < step + BLOCKED_RETRY_STEPS
        )

    def _has_room(self, head: Request, path: list[Node]) -> bool:
        geometry, store = self._geometry, self._store
        full, window = self._admitted.decoding, self._growing_windows()
        for request in self._admitted.prefilling:
            more_full, more_window = self._outstanding(request)
            full += more_full
            window += more_window
        hit = len(path)
        full += geometry.pages(head.num_tokens) - sum(node.refs > 0 for node in path)
        if full > store.full_available():
            return False
        first = geometry.first_visible(hit * geometry.page_size)
        window += self._window_demand(head) - sum(node.window_refs > 0 for node in path[first:])
        window += min(geometry.pages(min(self._chunk_size, head.num_tokens)), geometry.window_pages // 4)
        return window <= store.window_available()

    def _growing_windows(self) -> int:
        """Decoding requests that will hold more window pages than now; others give one back for each new."""
        if self._geometry.window is None:
            return 0
        _, slots = self._admitted.decode_rows()
        held = self._table.pages[slots] - self._table.first_window[slots]
        return int(np.count_nonzero(held < self._longest_window))

    def _outstanding(self, request: Request) -> tuple[int, int]:
        """Pages of each space that a request in prefill may still take."""
        held = int(self._table.pages[request.slot])
        window_held = held - int(self._table.first_window[request.slot])
        full = self._geometry.pages(request.num_tokens) - held
        return max(0, full), max(0, self._window_demand(request) - window_held)

    def _window_demand(self, request: Request) -> int:
        """Window pages that the request holds between its steps."""
        return self._geometry.window_pages_for(request.num_tokens, 1)
