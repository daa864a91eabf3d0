"""The page at ``/``: files of this package, served as they are, under a policy that allows nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interlock.server.errors import ApiError

ASSETS: Final = "/page/"
INDEX: Final = "index.html"
_TYPES: Final = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    content: bytes
    media_type: str

    @property
    def tag(self) -> str:
        """Its ETag."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def load_assets() -> Mapping[str, Asset]:
    """File name -> file, read once; nothing outside the package's folder can be asked for."""
    found = {}
    for path in files("interlock.server").joinpath("page").iterdir():
        media_type = _TYPES.get(path.name[path.name.rfind(".") :])
        if media_type is not None:
            found[path.name] = Asset(path.read_bytes(), media_type)
    return found


def page_router() -> APIRouter:
    """The endpoints; they need no API key, and hold nothing that would."""
    router = APIRouter(include_in_schema=False)
    assets = load_assets()

    @router.get("/")
    async def index(request: Request) -> Response:
        return assets[INDEX].answer(request)

    @router.get(ASSETS + "{name}")
    async def asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise ApiError(404, f"no such file of the page: {name[:100]!r}")
        return assets[name].answer(request)

    return router
