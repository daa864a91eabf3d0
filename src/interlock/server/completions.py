"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from interlock.engine.messages import SamplingParams
from interlock.server.answering import respond
from interlock.server.answers import Answer, Echo, best, collect, echo_of
from interlock.server.body import read_model
from interlock.server.chunks import ChunkWriter, envelope, whole_answer
from interlock.server.context import ServerContext
from interlock.server.errors import bad_request
from interlock.server.generation import Choice, Generation
from interlock.server.logprobs import completion_logprobs, generated_entries, prompt_logprobs
from interlock.server.meeting import meetings
from interlock.server.openapi import describes
from interlock.server.prompts import DEFAULT_COMPLETION_TOKENS, Prompt, completion_prompts
from interlock.server.protocol import CompletionBody
from interlock.server.sampling import check_logprobs, sampling_params
from interlock.server.settings import ServerSettings
from interlock.server.structured_output import checked, wished_grammar


def completions_router(context: ServerContext) -> APIRouter:
    """The endpoint, bound to ``context``."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=describes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue prompts of text or token ids."""
        arrival = time.perf_counter()
        body = await read_model(request, CompletionBody, max_bytes=context.settings.max_body_bytes)
        answer = await _CompletionRequest.build(body, context, arrival)
        return await respond(request, answer, stream=body.stream)

    return router


class _CompletionRequest:
    """A checked request: everything that can be refused has been when it exists."""

    def __init__(
        self, body: CompletionBody, context: ServerContext, generation: Generation, request_id: str
    ) -> None:
        self._body = body
        self._context = context
        self.generation = generation
        self._envelope = envelope(
            "text_completion", request_id, int(time.time()), body.model, context.fingerprint
        )

    @classmethod
    async def build(cls, body: CompletionBody, context: ServerContext, arrival: float) -> _CompletionRequest:
        context.check_model(body.model)
        _check_fields(body, context.settings)
        wish = wished_grammar(body)
        n = body.best_of or body.n or 1
        prompts = await completion_prompts(
            body.prompt,
            tokenizer=context.tokenizer,
            vocab_size=context.vocab_size,
            add_special_tokens=body.add_special_tokens is not False,
            max_prompts=context.settings.max_choices,
        )
        context.check_choices(len(prompts), n)
        samplings = [_sampling(body, context, prompt) for prompt in prompts]
        grammar = None if wish is None else await checked(wish, context)
        context.check_queue()
        request_id = f"cmpl-{uuid.uuid4().hex}"
        generation = Generation(
            context,
            prompts=prompts,
            samplings=samplings,
            n=n,
            request_id=request_id,
            priority=body.priority or 0,
            arrival=arrival,
            meetings=meetings(body, context.engine.plan, prompts=len(prompts), n=n),
            grammar=grammar,
            timeout=body.timeout,
        )
        return cls(body, context, generation, request_id)

    async def whole(self) -> bytes:
        """The non-streamed answer."""
        answers = await collect(self.generation)
        if self._body.best_of is not None:
            answers = best(answers, self._body.best_of, self._body.n or 1)
        choices = [self._choice(answer, index) for index, answer in enumerate(answers)]
        return whole_answer(self._envelope, choices, self.generation.usage())

    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        body, choice = self._body, answer.choice
        echo = echo_of(choice, self._context) if body.echo else None
        scored = choice.output.prompt_logprobs
        result: dict[str, Any] = {
            "index": index,
            "text": (echo.text if echo else "") + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if body.logprobs is not None:
            entries = generated_entries(answer.tokens, len(echo.text) if echo else 0)
            result["logprobs"] = self._logprobs((echo.entries(scored) if echo else []) + entries)
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = prompt_logprobs(scored, self._context.names)
        return result

    def _logprobs(self, entries: Any) -> dict[str, Any]:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return completion_logprobs(entries, self._context.names, as_ids=as_ids)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The streamed answer, without the final ``[DONE]``."""
        generation = self.generation
        writer = ChunkWriter.of(self._body, self._envelope, generation, chat=False)
        with_logprobs = self._body.logprobs is not None
        echoes: dict[int, Echo] = {}
        async for choice, piece in generation.pieces():
            index = choice.index
            if self._body.echo and index not in echoes:
                echoes[index] = echo_of(choice, self._context)
                yield self._echo_chunk(writer, choice, echoes[index])
            if piece.text or piece.tokens:
                logprobs = None
                if with_logprobs:
                    shift = len(echoes[index].text) if index in echoes else 0
                    logprobs = self._logprobs(generated_entries(piece.tokens, shift))
                yield writer.text(index, piece.text, logprobs)
            if piece.finish_reason is not None:
                yield writer.finish(index, piece.finish_reason, piece.stop_reason)
        if writer.includes_usage:
            yield writer.usage(generation.usage())

    def _echo_chunk(self, writer: ChunkWriter, choice: Choice, echo: Echo) -> bytes:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(echo.entries(choice.output.prompt_logprobs))
        return writer.text(choice.index, echo.text, logprobs)


def _sampling(body: CompletionBody, context: ServerContext, prompt: Prompt) -> SamplingParams:
    max_tokens = context.limit.answer_tokens(
        len(prompt.token_ids), body.max_tokens, DEFAULT_COMPLETION_TOKENS, prompt_param="prompt"
    )
    ranked = body.best_of is not None and body.best_of > (body.n or 1)
    wanted = [
        count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None
    ]
    return sampling_params(
        body,
        settings=context.settings,
        max_tokens=max_tokens,
        logprobs=0 if body.logprobs is None and ranked else body.logprobs,
        prompt_logprobs=max(wanted, default=None),
        vocab_size=context.vocab_size,
    )


def _check_fields(body: CompletionBody, settings: ServerSettings) -> None:
    check_logprobs("logprobs", body.logprobs, settings.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, settings.max_logprobs)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise bad_request(f"best_of is {body.best_of}, less than n = {body.n or 1}", param="best_of")
    if body.stream and body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            "best_of ranks whole answers, so it is not available in streams; leave it out or set it to n",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise bad_request(
            "max_tokens 0 asks for nothing; it needs echo (to score the prompt)", param="max_tokens"
        )
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request(
            "prompt_logprobs is not available in streams; use echo with logprobs", param="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
