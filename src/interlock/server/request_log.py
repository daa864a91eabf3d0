"""Gives every HTTP request an id, and writes one log line for its answer.

``X-Request-Id`` of the client is taken when it is short and plain, else one is made; the answer carries it,
and so does every log line that is written on the way. Probes and scrapes are logged at debug level.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from interlock.logs import REQUEST_ID, fields
from interlock.server.errors import CLIENT_CLOSED_REQUEST, as_api_error
from interlock.server.tracing import TRACE_PARENT

HEADER = "x-request-id"
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/load", "/experts"})
_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")
_SHOWN_PATH = 200
_log = logging.getLogger("interlock.access")


def request_id_of(given: str | None) -> str:
    """The client's id when it is 1 to 128 plain characters, else a new one."""
    return given if given and _PLAIN.fullmatch(given) else uuid.uuid4().hex


class RequestLogMiddleware:
    """The outermost layer: errors that nothing foresaw are answered here, with the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get(HEADER))
        token = REQUEST_ID.set(request_id)
        parent = TRACE_PARENT.set(headers.get("traceparent", ""))
        answer = _Answer(send, request_id)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if answer.status:
                raise
            await as_api_error(error).response()(scope, receive, answer.send)
        finally:
            answer.log(scope)
            REQUEST_ID.reset(token)
            TRACE_PARENT.reset(parent)


class _Answer:
    """What is sent for one request. ``status`` is 0 until something was."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self._send = send
        self._header = (HEADER.encode(), request_id.encode())
        self._begun = time.perf_counter()
        self._bytes = 0
        self._complete = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        elif message["type"] == "http.response.body":
            self._bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        await self._send(message)

    def log(self, scope: Scope) -> None:
        level = logging.DEBUG if scope["path"] in QUIET_PATHS or _is_asset(scope["path"]) else logging.INFO
        if not _log.isEnabledFor(level):
            return
        client = scope.get("client")
        told = fields(
            method=scope["method"],
            path=scope["path"][:_SHOWN_PATH],
            status=self.status or CLIENT_CLOSED_REQUEST,
            seconds=round(time.perf_counter() - self._begun, 6),
            bytes=self._bytes,
            client=client[0] if client else None,
        )
        _log.log(level, "answered" if self._complete else "cut short", extra=told)


def _is_asset(path: str) -> bool:
    return path.startswith("/page/")
