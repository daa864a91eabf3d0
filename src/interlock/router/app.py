"""The proxy as an ASGI application: every generating request goes to a prefill and a decode server at once.

The decode server's answer is the client's. A server that cannot be reached is taken out, and the request
goes to another pair as long as nothing of the answer was sent. After that, and where a server falls silent,
the client gets one error. A client that goes away ends both requests.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from interlock.router.pool import Backend, Pool
from interlock.server.disconnect import until_disconnect
from interlock.server.errors import CLIENT_CLOSED_REQUEST

ROOM_BITS = 63
TRIES = 3
GRACE_SECONDS = 1.0
"""For the decode server's own words on why a request failed, after the prefill server has said its."""
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_KEPT = ("content-type", "cache-control", "retry-after", "x-request-id")


def create_router(prefill: Pool, decode: Pool) -> Starlette:
    """The application."""
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=3.0), limits=httpx.Limits(max_connections=None)
    )
    proxy = _Proxy(prefill, decode, client)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        watches = [asyncio.create_task(pool.watch(client)) for pool in (prefill, decode)]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await client.aclose()

    routes = [Route(path, proxy.generate, methods=["POST"]) for path in GENERATING]
    routes.append(Route("/health", proxy.health))
    routes.append(Route("/v1/models", proxy.models))
    return Starlette(routes=routes, lifespan=lifespan)


class _Proxy:
    def __init__(self, prefill: Pool, decode: Pool, client: httpx.AsyncClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._client = client

    async def health(self, _request: Request) -> Response:
        alive = {"prefill": self._prefill.alive, "decode": self._decode.alive}
        return JSONResponse(alive, 200 if all(alive.values()) else 503)

    async def models(self, request: Request) -> Response:
        backend = self._decode.take()
        if backend is None:
            return _error(503, "no decode server answers")
        answer = await self._client.get(f"{backend.url}/v1/models", headers=_forwarded(request.headers))
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def generate(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            return _error(400, f"the body is no JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body is no JSON object")
        work = self._answer(request.url.path, body, _forwarded(request.headers))
        try:
            return await until_disconnect(request.receive, work, on_disconnect=_nothing)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        """Of the first pair that can be reached."""
        tried: set[Backend] = set()
        for _ in range(TRIES):
            pair = [pool.take(frozenset(tried)) for pool in (self._prefill, self._decode)]
            if pair[0] is None or pair[1] is None:
                break
            answer = await self._pair(path, body, headers, pair[0], pair[1])
            if isinstance(answer, Response):
                return answer
            tried |= answer
        which = "prefill" if self._prefill.take() is None else "decode"
        return _error(503, f"no {which} server answers")

    async def _pair(
        self, path: str, body: dict[str, Any], headers: dict[str, str], prefill: Backend, decode: Backend
    ) -> Response | set[Backend]:
        """The decode server's answer, or those of the two that could not be reached."""
        asked = body | {
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": secrets.randbits(ROOM_BITS),
        }
        async with AsyncExitStack() as stack:
            first = asyncio.create_task(self._open(prefill, path, asked, headers))
            second = asyncio.create_task(self._open(decode, path, asked, headers))
            lost = asyncio.create_task(self._decode.until_lost(decode))
            stack.push_async_callback(_close, first, second)
            stack.push_async_callback(_cancel, lost)
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            unreached: set[Backend] = set()
            for pool, backend, task in ((self._prefill, prefill, first), (self._decode, decode, second)):
                if task.done() and task.exception() is not None:
                    pool.note(backend, alive=False)
                    unreached.add(backend)
            if unreached:
                return unreached
            if first.done() and first.result().is_error:
                await asyncio.wait({second}, timeout=GRACE_SECONDS)
                if not second.done():
                    return await _whole(first.result())
            await asyncio.wait({second, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not second.done():
                return _error(502, _silent(decode))
            if second.exception() is not None:
                self._decode.note(decode, alive=False)
                return {decode}
            answer = second.result()
            kept = stack.pop_all()
            return StreamingResponse(
                _relay(kept, first, answer, lost, decode),
                answer.status_code,
                headers=_kept(answer),
            )
        raise AssertionError("unreachable")

    async def _open(
        self, backend: Backend, path: str, body: Mapping[str, Any], headers: dict[str, str]
    ) -> httpx.Response:
        """An answer whose content is still to be read; ``_close`` is for it."""
        request = self._client.build_request("POST", backend.url + path, json=body, headers=headers)
        return await self._client.send(request, stream=True)


async def _relay(
    kept: AsyncExitStack,
    first: asyncio.Task[httpx.Response],
    answer: httpx.Response,
    lost: asyncio.Task[None],
    decode: Backend,
) -> AsyncIterator[bytes]:
    """The decode server's bytes; the prefill server's are read and dropped. Closing ends both requests. A
    stream of events that breaks off ends with an error as its last event."""
    async with kept:
        drain = asyncio.create_task(_drain(first))
        try:
            async for chunk in _until(lost, answer.aiter_raw(), _silent(decode)):
                yield chunk
        except (httpx.HTTPError, _LostError) as error:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            message = str(error) if isinstance(error, _LostError) else f"the decode server {decode.url} died"
            yield b"\n\ndata: " + json.dumps(_content(502, message)).encode() + b"\n\ndata: [DONE]\n\n"
        finally:
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)


async def _until(
    lost: asyncio.Task[None], chunks: AsyncIterator[bytes], message: str
) -> AsyncIterator[bytes]:
    """``chunks`` to their end. Raises ``_LostError`` when ``lost`` is done first."""
    while True:
        chunk = asyncio.ensure_future(anext(chunks, None))
        try:
            await asyncio.wait({chunk, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not chunk.done():
                await _cancel(chunk)
        if chunk.cancelled():
            raise _LostError(message)
        if (content := chunk.result()) is None:
            return
        yield content


class _LostError(Exception):
    """The decode server has fallen silent; the text says which."""


def _silent(decode: Backend) -> str:
    return f"the decode server {decode.url} does not answer any more"


async def _whole(answer: httpx.Response) -> Response:
    return Response(await answer.aread(), answer.status_code, headers=_kept(answer))


def _kept(answer: httpx.Response) -> dict[str, str]:
    return {name: answer.headers[name] for name in _KEPT if name in answer.headers}


async def _drain(task: asyncio.Task[httpx.Response]) -> None:
    with suppress(httpx.HTTPError):
        async for _ in (await task).aiter_raw():
            pass


async def _nothing() -> None:
    return


async def _close(*answers: asyncio.Task[httpx.Response]) -> None:
    """End what was asked, whether its answer has begun or not."""
    await _cancel(*answers)
    for answer in answers:
        if not answer.cancelled() and answer.exception() is None:
            await answer.result().aclose()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ("authorization", "x-request-id") if name in headers}


def _error(status: int, message: str) -> Response:
    return JSONResponse(_content(status, message), status)


def _content(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
