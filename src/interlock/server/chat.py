"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interlock.engine.messages import SamplingParams
from interlock.server.answering import respond
from interlock.server.answers import Answer, collect
from interlock.server.body import read_model
from interlock.server.chat_output import ChatOutput, OutputFormat
from interlock.server.chat_prompt import render_chat
from interlock.server.chunks import ChunkWriter, envelope, whole_answer
from interlock.server.context import ServerContext
from interlock.server.errors import bad_request
from interlock.server.generation import Generation
from interlock.server.logprobs import chat_logprobs, prompt_logprobs
from interlock.server.openapi import describes
from interlock.server.prompts import Prompt, encode_text
from interlock.server.protocol import ChatBody
from interlock.server.sampling import check_logprobs, sampling_params
from interlock.server.settings import ServerSettings
from interlock.server.structured_output import Wish, checked
from interlock.server.text_output import Piece
from interlock.server.tools import checked_tools, wished_chat_grammar
from interlock.structured.spec import GrammarSpec


def chat_router(context: ServerContext) -> APIRouter:
    """The endpoint, bound to ``context``."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=describes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrival = time.perf_counter()
        body = await read_model(request, ChatBody, max_bytes=context.settings.max_body_bytes)
        answer = await _ChatRequest.build(body, context, arrival)
        return await respond(request, answer, stream=body.stream)

    return router


class _ChatRequest:
    """A checked request: everything that can be refused has been when it exists."""

    def __init__(
        self,
        body: ChatBody,
        context: ServerContext,
        generation: Generation,
        request_id: str,
        form: OutputFormat,
    ) -> None:
        self._form = form
        self._body = body
        self._context = context
        self.generation = generation
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = envelope(kind, request_id, int(time.time()), body.model, context.fingerprint)

    @classmethod
    async def build(cls, body: ChatBody, context: ServerContext, arrival: float) -> _ChatRequest:
        context.check_model(body.model)
        _check_fields(body, context.settings)
        tools = checked_tools(body)
        formats = context.chat_formats
        wish = wished_chat_grammar(body, tools, formats.parser)
        n = body.n or 1
        context.check_choices(1, n)
        text = render_chat(body, context.tokenizer)
        ids = await encode_text(context.tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
        if not ids:
            raise bad_request("the chat template renders these messages to no tokens", param="messages")
        prompt = Prompt(tuple(ids), text)
        sampling = _sampling(body, context, prompt)
        grammar = None if wish is None else await _grammar(wish, text, context)
        context.check_queue()
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        generation = Generation(
            context,
            prompts=[prompt],
            samplings=[sampling],
            n=n,
            request_id=request_id,
            priority=body.priority or 0,
            arrival=arrival,
            grammar=grammar,
            kept_tokens=formats.markers,
            timeout=body.timeout,
        )
        form = formats.output(
            text,
            [] if body.tool_choice == "none" else tools,
            single_call=body.parallel_tool_calls is False,
            separate=body.separate_reasoning is not False,
            show=body.include_reasoning is not False,
        )
        return cls(body, context, generation, request_id, form)

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


async def _grammar(wish: Wish, prompt: str, context: ServerContext) -> GrammarSpec:
    """The constraint of an answer to ``prompt``, from its first token or after the reasoning it begins in."""
    formats = context.chat_formats
    after = formats.constraint_start(prompt, wish[0])
    markers = formats.call_markers if wish[1].kind == "structural_tag" else ()
    spec = msgspec.structs.replace(wish[1], markers=markers, after_token=after)
    return await checked((wish[0], spec), context)


def _sampling(body: ChatBody, context: ServerContext, prompt: Prompt) -> SamplingParams:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = context.limit.answer_tokens(
        len(prompt.token_ids), getattr(body, name), None, prompt_param="messages", answer_param=name
    )
    return sampling_params(
        body,
        settings=context.settings,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        vocab_size=context.vocab_size,
    )


def _check_fields(body: ChatBody, settings: ServerSettings) -> None:
    check_logprobs("top_logprobs", body.top_logprobs, settings.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, settings.max_logprobs)
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request(
            f"max_tokens {both[0]} and max_completion_tokens {both[1]} differ; give one of them",
            param="max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs is not available in streams", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
