"""A streaming response over server-sent events that notices failures before and after the first byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from interlock.server.chunks import DONE
from interlock.server.disconnect import until_disconnect
from interlock.server.errors import as_api_error

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends ``chunks`` as they come.

    The status waits for the first chunk: an error before it goes to the error handlers. A later error is
    one event with the error object and then ``last``; no finish reason is made up.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        *,
        on_disconnect: Callable[[], Awaitable[None]],
        last: bytes = DONE,
    ) -> None:
        super().__init__()
        self._on_disconnect = on_disconnect
        self._last = last
        self._chunks: Any = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send), on_disconnect=self._on_disconnect)
        except ClientDisconnect:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            chunk = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            try:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = self._last
            except Exception as error:
                last = b"data: " + as_api_error(error).body() + b"\n\n" + self._last
            await send({"type": "http.response.body", "body": last, "more_body": False})
