"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interlock.server.answering import respond
from interlock.server.answers import Answer, collect
from interlock.server.body import read_model
from interlock.server.chat_output import ChatOutput
from interlock.server.chat_request import PreparedChat, prepare_chat
from interlock.server.chunks import ChunkWriter, envelope, whole_answer
from interlock.server.context import ServerContext
from interlock.server.logprobs import chat_logprobs, prompt_logprobs
from interlock.server.openapi import describes
from interlock.server.protocol import ChatBody
from interlock.server.text_output import Piece


def chat_router(context: ServerContext) -> APIRouter:
    """The endpoint, bound to ``context``."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=describes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.perf_counter()
        body = await read_model(request, ChatBody, max_bytes=context.settings.max_body_bytes)
        prepared = await prepare_chat(body, context, arrival, prefix="chatcmpl-")
        answer = _ChatAnswer(body, context, prepared)
        return await respond(request, answer, stream=body.stream)

    return router


class _ChatAnswer:
    """A prepared request in the form of this API."""

    def __init__(self, body: ChatBody, context: ServerContext, prepared: PreparedChat) -> None:
        self._form = prepared.form
        self._body = body
        self._context = context
        self.generation = prepared.generation
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        created = int(time.time())
        self._envelope = envelope(kind, prepared.request_id, created, body.model, context.fingerprint)

    async def whole(self) -> bytes:
        """The non-streamed answer."""
        answers = await collect(self.generation)
        extra: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            scored = answers[0].choice.output.prompt_logprobs
            extra["prompt_logprobs"] = prompt_logprobs(scored, self._context.names)
        choices = [self._choice(answer) for answer in answers]
        return whole_answer(self._envelope, choices, self.generation.usage(), **extra)

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        reason = answer.finish_reason
        if not self._form.is_plain:
            output = ChatOutput(self._form)
            output.feed(answer.text, ended=True)
            reason = output.finish_reason(str(reason))
            message |= output.message()
        return {
            "index": answer.choice.index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": reason,
            "stop_reason": answer.stop_reason,
        }

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(tokens, self._context.names, as_ids=as_ids)

    def _piece_chunks(
        self, writer: ChunkWriter, index: int, piece: Piece, output: ChatOutput
    ) -> Iterator[bytes]:
        logprobs = self._logprobs(piece.tokens)
        if self._form.is_plain:
            if piece.text or piece.tokens:
                yield writer.text(index, piece.text, logprobs)
            return
        deltas = output.feed(piece.text, ended=piece.finish_reason is not None)
        if logprobs is not None and piece.tokens and not deltas:
            deltas = [{"content": ""}]
        for position, delta in enumerate(deltas):
            yield writer.delta(index, delta, None if position else logprobs)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The streamed answer, without the final ``[DONE]``."""
        generation = self.generation
        writer = ChunkWriter.of(self._body, self._envelope, generation, chat=True)
        opened: set[int] = set()
        outputs = [ChatOutput(self._form) for _ in generation.choices]
        async for choice, piece in generation.pieces():
            index = choice.index
            if index not in opened:
                opened.add(index)
                yield writer.role(index)
            for chunk in self._piece_chunks(writer, index, piece, outputs[index]):
                yield chunk
            if piece.finish_reason is not None:
                reason = outputs[index].finish_reason(piece.finish_reason)
                yield writer.finish(index, reason, piece.stop_reason)
        if writer.includes_usage:
            yield writer.usage(generation.usage())
