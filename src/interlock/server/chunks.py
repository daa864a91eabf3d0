"""Server-sent events of both APIs, assembled from bytes that are fixed for a request.

Only the token's text is encoded for each chunk: 256 streams of one token a step leave no time for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from interlock.server.generation import Generation
from interlock.server.protocol import GenerationBody, StreamOptions

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class ChunkWriter:
    """Encodes the chunks of one streamed answer.

    Args:
        envelope: fields of every chunk (id, object, created, model, ...).
        chat: the text goes to ``delta.content`` instead of ``text``.
        include_usage: chunks carry ``"usage": null`` and ``usage_chunk`` will follow.
        usage_so_far: gives the usage to put in every chunk; None for none.

    Attributes:
        includes_usage: the stream ends with ``usage``.
    """

    def __init__(
        self,
        envelope: dict[str, Any],
        *,
        choices: int,
        chat: bool,
        include_usage: bool,
        usage_so_far: Callable[[], dict[str, object]] | None,
    ) -> None:
        start = b"data: " + _encode(envelope)[:-1]
        self._chat = chat
        self._empty_choices = start + b',"choices":[]'
        self._heads = [start + b',"choices":[{"index":%d,' % index for index in range(choices)]
        self._text_open = b'"delta":{"content":' if chat else b'"text":'
        self._text_close = b"}" if chat else b""
        self.includes_usage = include_usage
        self._usage_so_far = usage_so_far
        self._null_usage = b',"usage":null' if include_usage else b""
        self._plain_tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'

    @classmethod
    def of(
        cls, body: GenerationBody, envelope: dict[str, Any], generation: Generation, *, chat: bool
    ) -> ChunkWriter:
        """The writer for the chunks of ``generation``, with the usage that ``body`` asks for."""
        options = body.stream_options or StreamOptions()
        return cls(
            envelope,
            choices=len(generation.choices),
            chat=chat,
            include_usage=options.include_usage,
            usage_so_far=generation.usage if options.continuous_usage_stats else None,
        )

    def _close(self) -> bytes:
        if self._usage_so_far is not None:
            return b',"usage":' + _encode(self._usage_so_far()) + b"}\n\n"
        return self._null_usage + b"}\n\n"

    def role(self, index: int) -> bytes:
        """Chat only: the chunk that opens choice ``index``."""
        opening = b'"delta":{"role":"assistant","content":""}'
        return self._heads[index] + opening + self._plain_tail + self._close()

    def text(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """New text, with the logprobs of the tokens released with it."""
        head = self._heads[index] + self._text_open + _encode(text) + self._text_close
        if logprobs is None:
            return head + self._plain_tail + self._close()
        scores = b',"logprobs":' + _encode(logprobs)
        return head + scores + b',"finish_reason":null,"stop_reason":null}]' + self._close()

    def delta(self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> bytes:
        """Chat only: anything but plain text."""
        head = self._heads[index] + b'"delta":' + _encode(delta)
        if logprobs is None:
            return head + self._plain_tail + self._close()
        scores = b',"logprobs":' + _encode(logprobs)
        return head + scores + b',"finish_reason":null,"stop_reason":null}]' + self._close()

    def finish(self, index: int, reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of choice ``index``; it carries no text."""
        empty = b'"delta":{}' if self._chat else b'"text":""'
        ending = b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}]' % (
            _encode(reason),
            _encode(stop_reason),
        )
        return self._heads[index] + empty + ending + self._close()

    def usage(self, usage: dict[str, object]) -> bytes:
        """The extra last chunk of ``stream_options.include_usage``: no choices."""
        return self._empty_choices + b',"usage":' + _encode(usage) + b"}\n\n"


def envelope(kind: str, request_id: str, created: int, model: str, fingerprint: str) -> dict[str, Any]:
    """Fields that every chunk and every whole answer begins with."""
    return {
        "id": request_id,
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": fingerprint,
    }


def whole_answer(
    fields: dict[str, Any], choices: Sequence[dict[str, Any]], usage: dict[str, object], **extra: Any
) -> bytes:
    """A non-streamed answer as JSON."""
    return _encode({**fields, "choices": choices, "usage": usage, **extra})
