"""``POST /v1/responses``: OpenAI's newer API, for text and functions. Nothing is stored."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interlock.server.answering import respond
from interlock.server.answers import collect
from interlock.server.body import read_model
from interlock.server.chat_output import ChatOutput
from interlock.server.chat_request import PreparedChat, prepare_chat
from interlock.server.context import ServerContext
from interlock.server.errors import ApiError, as_api_error
from interlock.server.openapi import describes
from interlock.server.responses_input import chat_body, own_error
from interlock.server.responses_items import ResponseItems
from interlock.server.responses_protocol import ResponsesBody

_INCOMPLETE = {"length": "max_output_tokens"}


def responses_router(context: ServerContext) -> APIRouter:
    """The endpoints, bound to ``context``."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=describes(ResponsesBody))
    async def responses(request: Request) -> Response:
        """Answer a conversation of messages and function calls."""
        arrival = time.perf_counter()
        body = await read_model(request, ResponsesBody, max_bytes=context.settings.max_body_bytes)
        try:
            prepared = await prepare_chat(chat_body(body), context, arrival, prefix="resp_")
        except ApiError as error:
            raise own_error(error) from None
        return await respond(request, _Response(body, context, prepared), stream=body.stream, last=b"")

    @router.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str) -> Response:
        """Refused: nothing is stored."""
        raise ApiError(
            404, f"no response {response_id[:80]!r}: responses are not stored here", code="response_not_found"
        )

    return router


class _Response:
    """A prepared request in the form of this API."""

    def __init__(self, body: ResponsesBody, context: ServerContext, prepared: PreparedChat) -> None:
        self._body = body
        self._context = context
        self._form = prepared.form
        self._id = prepared.request_id
        self._created = time.time()
        self._items = ResponseItems()
        self._numbers = itertools.count()
        self.generation = prepared.generation

    async def whole(self) -> bytes:
        """The non-streamed answer."""
        (answer,) = await collect(self.generation)
        output = ChatOutput(self._form)
        for delta in output.feed(answer.text, ended=True):
            self._items.take(delta)
        self._items.finish(complete=answer.finish_reason == "stop")
        return msgspec.json.encode(self._final(str(answer.finish_reason), answer.stop_reason))

    async def chunks(self) -> AsyncIterator[bytes]:
        """The streamed answer; an error after its beginning is the event ``response.failed``."""
        output = ChatOutput(self._form)
        begun = False
        try:
            async for _, piece in self.generation.pieces():
                if not begun:
                    begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event({"type": kind, "response": self._object("in_progress")})
                ended = piece.finish_reason is not None
                for delta in output.feed(piece.text, ended=ended):
                    for event in self._items.take(delta):
                        yield self._event(event)
                if piece.finish_reason is not None:
                    for event in self._items.finish(complete=piece.finish_reason == "stop"):
                        yield self._event(event)
                    final = self._final(piece.finish_reason, piece.stop_reason)
                    yield self._event({"type": f"response.{final['status']}", "response": final})
        except Exception as error:
            if not begun:
                raise
            told = as_api_error(error)
            failure = {"code": told.code or "server_error", "message": told.message}
            failed = {**self._object("failed"), "error": failure}
            yield self._event({"type": "response.failed", "response": failed})

    def _event(self, event: dict[str, Any]) -> bytes:
        data = msgspec.json.encode({**event, "sequence_number": next(self._numbers)})
        return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), data)

    def _final(self, reason: str, stop_reason: int | str | None) -> dict[str, Any]:
        status = "completed" if reason == "stop" else "incomplete"
        details = None
        if status == "incomplete":
            details = {"reason": _INCOMPLETE.get(reason, str(stop_reason or reason))}
        return {**self._object(status), "incomplete_details": details, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        usage: Any = self.generation.usage()
        thought = self._items.reasoning
        tokenizer = self._context.tokenizer
        reasoning = len(tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }

    def _object(self, status: str) -> dict[str, Any]:
        body, sampling = self._body, self.generation.choices[0].request.sampling
        form = body.text.format if body.text else None
        text = form.model_dump(by_alias=True, exclude_none=True) if form else None
        choice: Any = body.tool_choice or "auto"
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }
