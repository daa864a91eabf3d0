"""One streamed request over HTTP, and when each part of its answer came.

Times are those of the event loop's clock, in seconds. The first token is the first chunk with content or
reasoning; a chunk that only names the role is none. What never came is None, not zero.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class Ask:
    """What is sent: ``endpoint`` is "chat" or "completions"; ``extra`` goes into the body as it is."""

    prompt: str
    max_tokens: int
    model: str
    endpoint: str = "chat"
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self) -> dict[str, Any]:
        text: dict[str, Any] = {"prompt": self.prompt}
        if self.endpoint == "chat":
            text = {"messages": [{"role": "user", "content": self.prompt}]}
        return {
            "model": self.model,
            **text,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }


@dataclass(slots=True)
class Exchange:
    """What happened to one request.

    Attributes:
        due: when it should have been sent; latencies count from here.
        sent: when it was.
        chunks: when each chunk with content or reasoning came.
        ended: when the answer was over, however it ended.
        status: "completed" (a finish reason came), "failed" (refused, an error, no connection) or
            "incomplete" (cut by the time limit, or the stream ended without a finish reason).
        usage_tokens, prompt_tokens, cached_tokens: as the server counted them; None where it did not say.
    """

    index: int
    asked_tokens: int
    due: float
    sent: float = 0.0
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    status: str = "incomplete"
    error: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def lateness(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def latency(self) -> float | None:
        """From when it was due to the end of the answer; None unless completed."""
        return self.ended - self.due if self.status == "completed" else None

    @property
    def output_tokens(self) -> int:
        """Tokens received: the server's count, or the number of chunks where it gives none."""
        return len(self.chunks) if self.usage_tokens is None else self.usage_tokens

    @property
    def gaps(self) -> list[float]:
        """Times between chunks; the time to the first one is not among them."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """(last chunk - first chunk) / (tokens - 1); None for less than two tokens."""
        if len(self.chunks) < 2 or self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


class Sender(Protocol):
    """Sends one request and fills in its exchange; raises nothing but cancellation."""

    async def send(self, ask: Ask, exchange: Exchange) -> None: ...


class HttpSender:
    """A ``Sender`` over one httpx client; ``base_url`` is the client's."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def send(self, ask: Ask, exchange: Exchange) -> None:
        clock = asyncio.get_running_loop().time
        exchange.sent = clock()
        try:
            async with self._client.stream("POST", ask.path, json=ask.body()) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    _fail(exchange, f"{response.status_code}: {text[:MAX_ERROR_CHARS]}")
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data:") and not _take(exchange, line[5:].strip(), clock()):
                        break
        except httpx.HTTPError as error:
            _fail(exchange, f"{type(error).__name__}: {error}")
        finally:
            exchange.ended = clock()
        if exchange.status == "incomplete" and exchange.finish_reason is not None:
            exchange.status = "completed"
        if exchange.status == "incomplete" and not exchange.error:
            exchange.error = "the stream ended without a finish reason"


def _fail(exchange: Exchange, error: str) -> None:
    exchange.status, exchange.error = "failed", error


def _take(exchange: Exchange, data: str, now: float) -> bool:
    """One event; False at the end of the stream."""
    if data == "[DONE]":
        return False
    try:
        event = json.loads(data)
    except ValueError:
        _fail(exchange, f"not JSON: {data[:MAX_ERROR_CHARS]}")
        return False
    if not isinstance(event, dict):
        _fail(exchange, f"not an object: {data[:MAX_ERROR_CHARS]}")
        return False
    if event.get("error"):
        _fail(exchange, json.dumps(event["error"])[:MAX_ERROR_CHARS])
        return False
    _take_usage(exchange, event.get("usage"))
    for choice in event.get("choices") or ():
        if not isinstance(choice, dict):
            _fail(exchange, f"not a choice: {data[:MAX_ERROR_CHARS]}")
            return False
        part = choice.get("delta") or choice
        if any(part.get(name) for name in ("content", "text", "reasoning_content", "reasoning")):
            exchange.chunks.append(now)
        exchange.finish_reason = choice.get("finish_reason") or exchange.finish_reason
    return True


def _take_usage(exchange: Exchange, usage: Any) -> None:
    if not isinstance(usage, dict):
        return
    exchange.usage_tokens = usage.get("completion_tokens", exchange.usage_tokens)
    exchange.prompt_tokens = usage.get("prompt_tokens", exchange.prompt_tokens)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        exchange.cached_tokens = details.get("cached_tokens", exchange.cached_tokens)
