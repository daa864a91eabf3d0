"""Servers that do as a test says, behind the real proxy, all in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from interlock.router.app import create_router
from interlock.router.pool import Backend, Pool
from interlock.server.serve import listen

PATH = "/v1/completions"


@dataclass
class Stub:
    """One server. ``answer`` makes the answer of a request's body.

    Attributes:
        ready: status of /ready; 0 never answers.
        counts: requests by how they went: "asked", "gone" (the asker went away first).
    """

    answer: Callable[[dict[str, Any]], Awaitable[Response]]
    ready: int = 200
    url: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    rooms: list[int] = field(default_factory=list)
    stop: Callable[[], Awaitable[None]] | None = None

    def app(self) -> ASGIApp:
        return Starlette(routes=[Route(PATH, self._ask, methods=["POST"]), Route("/ready", self._ready)])

    async def _ready(self, _request: Request) -> Response:
        if not self.ready:
            await asyncio.sleep(3600)
        return JSONResponse({}, self.ready)

    async def _ask(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.counts["asked"] += 1
        self.rooms.append(body["bootstrap_room"])
        try:
            task = asyncio.ensure_future(self.answer(body))
            gone = asyncio.ensure_future(request.receive())
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.counts["gone"] += 1
                task.cancel()
                return Response(status_code=499)
            return task.result()
        finally:
            gone.cancel()


@asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """The URL, and a coroutine that ends the server at once, connections included."""
    listener = listen("127.0.0.1", port)
    config = uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve(sockets=[listener]))

    def abort_connections() -> None:
        for connection in list(server.server_state.connections):
            if transport := getattr(connection, "transport", None):
                transport.abort()

    async def stop() -> None:
        abort_connections()
        server.should_exit = server.force_exit = True
        await task
        listener.close()
        abort_connections()  # accepted meanwhile, they would be answered for as long as they are kept

    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", stop
    finally:
        if not task.done():
            await stop()


@asynccontextmanager
async def routed(prefill: list[Stub], decode: list[Stub]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the proxy in front of the stubs."""
    async with AsyncExitStack() as stack:
        pools = []
        for kind, stubs in (("prefill", prefill), ("decode", decode)):
            for stub in stubs:
                stub.url, stub.stop = await stack.enter_async_context(serving(stub.app()))
            pools.append(Pool(kind, tuple(Backend(stub.url) for stub in stubs)))
        url, _ = await stack.enter_async_context(serving(create_router(*pools)))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
