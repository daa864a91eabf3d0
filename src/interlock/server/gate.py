"""Whether new work is taken: open while serving, closed while running requests finish before the end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from interlock.server.errors import ApiError


class Gate:
    """Counts the requests that do work (every POST) and stops taking new ones when told to.

    Attributes:
        in_flight: requests that were taken and have not been answered in full.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._closed_until: float | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        return self._closed_until is None

    def close(self, seconds: float) -> None:
        """Refuse new work from now on; the process ends within ``seconds``."""
        if self.is_open:
            self._closed_until = time.monotonic() + seconds

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is in flight; False when something still is after ``seconds``."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return not self.in_flight
        return True

    def enter(self) -> None:
        """One more request is taken.

        Raises:
            ApiError: 503, the gate is closed.
        """
        if self._closed_until is not None:
            left = max(1, math.ceil(self._closed_until - time.monotonic()))
            raise ApiError(
                503,
                "the server is shutting down and takes no new requests; send it to another replica, "
                f"or again in {left} s",
                code="shutting_down",
                headers={"Retry-After": str(left), "Connection": "close"},
            )
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()


class GateMiddleware:
    """Lets POST requests through while the gate is open; questions about the server always pass."""

    def __init__(self, app: ASGIApp, gate: Gate, on_rejected: Callable[[int], None]) -> None:
        self._app = app
        self._gate = gate
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._gate.enter()
        except ApiError as error:
            self._on_rejected(error.status)
            await error.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()
