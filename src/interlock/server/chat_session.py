"""A conversation with any OpenAI-compatible server: history, streaming, cancelling. No terminal in here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from interlock.errors import InterlockError

_CONNECT_SECONDS = 5.0


class ChatError(InterlockError):
    """The server cannot be reached, or answers with an error."""


@dataclass(frozen=True)
class ChatOptions:
    """Request fields of every turn; None leaves a field to the server (a model: to its first)."""

    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class TurnStats:
    """Figures of the last answer; None where nothing came or the server does not report them."""

    first_token_seconds: float | None
    seconds: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate: tokens after the first over the time after the first."""
        if self.completion_tokens is None or self.completion_tokens < 2 or self.first_token_seconds is None:
            return None
        elapsed = self.seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / elapsed if elapsed > 0 else None


def api_url(base_url: str) -> str:
    """``base_url`` with ``/v1`` added when it has no path.

    Raises:
        ChatError: no http or https URL.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ChatError(f"{base_url!r} is no URL of a server; expected something like http://127.0.0.1:8000")
    path = parts.path.rstrip("/") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


class ChatSession:
    """One conversation. Use as a context manager.

    Attributes:
        model: the model that answers.
        messages: the conversation so far, the system message first if there is one.
        last: figures of the last answer.
    """

    def __init__(self, base_url: str, options: ChatOptions) -> None:
        self.url = api_url(base_url)
        self._options = options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)
        self.messages: list[dict[str, str]] = []
        self.last: TurnStats | None = None
        self.reset(system=options.system)
        try:
            self.model = options.model or self._first_model()
        except ChatError:
            self._http.close()
            raise

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        first = self.messages[0] if self.messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation; begin with ``system`` if given."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(
        self, text: str, *, on_reasoning: Callable[[str], None] | None = None
    ) -> Generator[str, None, None]:
        """Send ``text`` and yield the answer's text as it comes.

        Reasoning that comes before it goes to ``on_reasoning``, and is not kept in the history.

        Closing the iterator (or an exception at its ``yield``) stops the answer on the server; what had come
        stays in the history. After an error the question is taken back, so that it can be asked again.

        Raises:
            ChatError: the server cannot be reached, refuses, or fails in the middle.
        """
        self.messages.append({"role": "user", "content": text})
        parts: list[str] = []
        turn = _Turn()
        failed = False
        try:
            for event in self._events():
                piece, thought = turn.take(event)
                if thought and on_reasoning is not None:
                    on_reasoning(thought)
                if piece:
                    parts.append(piece)
                    yield piece
        except (ChatError, httpx.HTTPError) as error:
            failed = True
            raise error if isinstance(error, ChatError) else ChatError(self._explain(error)) from error
        finally:
            self.last = turn.stats()
            if failed or not parts:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": "".join(parts)})

    def _events(self) -> Generator[dict[str, Any], None, None]:
        options = self._options
        optional = {
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "seed": options.seed,
        }
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }
        with self._http.stream("POST", "/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_error_text(response))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    yield _decode(data)
        raise ChatError("the server ended the answer in the middle")

    def _first_model(self) -> str:
        try:
            response = self._http.get("/models")
            if response.status_code != 200:
                raise ChatError(_error_text(response))
            models = response.json()["data"]
            return str(models[0]["id"])
        except httpx.HTTPError as error:
            raise ChatError(self._explain(error)) from error
        except (ValueError, LookupError, TypeError):
            raise ChatError(
                f"{self.url}/models lists no models; is this an OpenAI-compatible server?"
            ) from None

    def _explain(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"cannot reach {self.url}: {error}; is the server running?"
        return f"{self.url}: {error or type(error).__name__}"


class _Turn:
    """Reads the events of one answer."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None

    def take(self, event: dict[str, Any]) -> tuple[str, str]:
        """The text and the reasoning that ``event`` adds."""
        if event.get("error"):
            error = event["error"]
            raise ChatError(str(error.get("message") if isinstance(error, dict) else error))
        self._usage = event.get("usage") or self._usage
        choices = event.get("choices") or [{}]
        self._finish_reason = choices[0].get("finish_reason") or self._finish_reason
        delta = choices[0].get("delta") or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if (text or thought) and self._first is None:
            self._first = time.perf_counter() - self._start
        return str(text), str(thought)

    def stats(self) -> TurnStats:
        details = self._usage.get("prompt_tokens_details") or {}
        return TurnStats(
            first_token_seconds=self._first,
            seconds=time.perf_counter() - self._start,
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            finish_reason=self._finish_reason,
        )


def _decode(data: str) -> dict[str, Any]:
    with suppress(ValueError):
        event = json.loads(data)
        if isinstance(event, dict):
            return event
    raise ChatError(f"the server sent an event that is no JSON object: {data[:80]!r}")


def _error_text(response: httpx.Response) -> str:
    with suppress(ValueError, LookupError, TypeError):
        return f"{response.json()['error']['message']} (HTTP {response.status_code})"
    return f"HTTP {response.status_code}: {response.text[:200]}"
