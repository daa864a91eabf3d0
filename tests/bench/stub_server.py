"""An OpenAI-compatible server inside the client's transport, with known delays on the loop's clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Event = tuple[float, dict[str, Any] | str]


@dataclass(frozen=True)
class Answer:
    """Events with the seconds before each; ``hangs`` never ends after them."""

    events: list[Event]
    status: int = 200
    hangs: bool = False


def chunk(
    text: str = "", *, role: bool = False, reasoning: str = "", finish: str | None = None
) -> dict[str, Any]:
    delta: dict[str, Any] = {"role": "assistant"} if role else {}
    if text:
        delta["content"] = text
    if reasoning:
        delta["reasoning_content"] = reasoning
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    counted: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": counted}


def plain(first: float, between: float, tokens: int, *, prompt: int = 8, cached: int = 0) -> Answer:
    """First token after ``first`` seconds, the others ``between`` apart, then usage and the end."""
    events: list[Event] = [(0.0, chunk(role=True)), (first, chunk("a"))]
    events += [(between, chunk("b")) for _ in range(tokens - 1)]
    events += [(0.0, chunk(finish="length")), (0.0, usage(prompt, tokens, cached)), (0.0, "[DONE]")]
    return Answer(events)


@dataclass
class StubServer(httpx.AsyncBaseTransport):
    """``play(number, body)`` answers the request; numbers count from 0, warm-up included.

    ``lanes``: requests that are served at once, 0 for any number; the others wait in line.
    """

    play: Callable[[int, dict[str, Any]], Answer]
    lanes: int = 0
    plan: dict[str, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    on_request: Callable[[int], None] = lambda number: None
    _gate: asyncio.Semaphore | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "stub"}]})
        if request.url.path == "/plan":
            if self.plan is None:
                return httpx.Response(404)
            return httpx.Response(200, json={"plan": self.plan, "receipts": {}})
        body = json.loads(await request.aread())
        number = len(self.bodies)
        self.bodies.append(body)
        self.on_request(number)
        answer = self.play(number, body)
        if answer.status != 200:
            return httpx.Response(answer.status, json={"error": {"message": "stub"}})
        if self.lanes and self._gate is None:
            self._gate = asyncio.Semaphore(self.lanes)
        return httpx.Response(200, stream=_Events(answer, self._gate))


class _Events(httpx.AsyncByteStream):
    def __init__(self, answer: Answer, gate: asyncio.Semaphore | None) -> None:
        self._answer = answer
        self._gate = gate

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._gate is None:
            async for part in self._parts():
                yield part
            return
        async with self._gate:
            async for part in self._parts():
                yield part

    async def _parts(self) -> AsyncIterator[bytes]:
        for delay, event in self._answer.events:
            if delay:
                await asyncio.sleep(delay)
            text = event if isinstance(event, str) else json.dumps(event)
            yield f"data: {text}\n\n".encode()
        if self._answer.hangs:
            await asyncio.sleep(1e9)
