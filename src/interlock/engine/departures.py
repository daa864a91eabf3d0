"""Requests that ended while the step in flight, or another reader, still used their pages."""

from __future__ import annotations

from collections.abc import Iterator

from interlock.engine.admitted import Admitted
from interlock.engine.batch import Batch
from interlock.engine.request import Request


class Departures:
    """Takes ended requests out of the slot table as soon as nobody uses their pages (``Request.holds``)."""

    def __init__(self, admitted: Admitted) -> None:
        self._admitted = admitted
        self._spoilt: dict[Request, bool] = {}

    def __len__(self) -> int:
        return len(self._spoilt)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._spoilt))

    def end(self, request: Request, in_flight: Batch | None, *, spoilt: bool = False) -> None:
        """An admitted request ends: at once, or with ``let_go`` while a step is in flight. ``spoilt`` as for
        ``Admitted.leave``."""
        if in_flight is None and not request.holds:
            self._admitted.leave(request, spoilt=spoilt)
        else:
            self._admitted.forget(request)
            self._spoilt[request] = spoilt

    def let_go(self, in_flight: Batch | None) -> None:
        """Take out those whom nobody reads and the step in flight does not work on."""
        busy = frozenset(in_flight.participants) if in_flight and self._spoilt else frozenset()
        for request in [r for r in self._spoilt if not r.holds and r not in busy]:
            self._admitted.leave(request, spoilt=self._spoilt.pop(request))
