"""The API key: one bearer token for everything but probes and scrapes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from interlock.server.errors import ApiError
from interlock.server.page_router import ASSETS

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})
"""Paths that need no key, as load balancers and Prometheus expect (vLLM and SGLang leave them open too)."""


def is_open(path: str) -> bool:
    """Whether ``path`` needs no key: probes, scrapes, and the page, which asks for the key itself."""
    return path in OPEN_PATHS or path.startswith(ASSETS)


class ApiKeyMiddleware:
    """Answers 401 to requests without ``Authorization: Bearer KEY``. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str, on_rejected: Callable[[int], None]) -> None:
        self._app = app
        self._on_rejected = on_rejected
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]) or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        self._on_rejected(401)
        error = ApiError(
            401,
            "the API key is missing or wrong; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace"))
        return hmac.compare_digest(given, self._digest) and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    """Digests have one length, so that not even the key's length shows in the time."""
    return hashlib.sha256(key).digest()
