"""Runs all engine requests of one HTTP request and merges what they produce."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import msgspec

from interlock.engine.client_protocol import EngineClient
from interlock.engine.messages import AddRequest, Meeting, SamplingParams, TokenDelta
from interlock.server.choice_times import ChoiceClock
from interlock.server.context import ServerContext
from interlock.server.errors import ApiError
from interlock.server.metrics import Metrics
from interlock.server.prompts import Prompt
from interlock.server.sampling import seed_of_choice
from interlock.server.text_output import Piece, TextOutput
from interlock.server.usage import usage
from interlock.structured.spec import GrammarSpec


@dataclass(frozen=True)
class Choice:
    """One engine request and the text it becomes. ``index`` is the choice's place in the answer."""

    index: int
    prompt: Prompt
    request: AddRequest
    output: TextOutput


class Generation:
    """The choices of one HTTP request: choice i * n + j is sample j of prompt i."""

    def __init__(
        self,
        context: ServerContext,
        *,
        prompts: Sequence[Prompt],
        samplings: Sequence[SamplingParams],
        n: int,
        request_id: str,
        priority: int,
        arrival: float,
        meetings: Sequence[Meeting | None] | None = None,
        grammar: GrammarSpec | None = None,
        kept_tokens: frozenset[int] = frozenset(),
        timeout: float | None = None,
    ) -> None:
        """
        Args:
            samplings: one for each prompt, with the seed of choice 0.
            request_id: unique in this process; choices append their index.
            arrival: ``time.perf_counter()`` when the HTTP request came.
            meetings: one for each choice, on a prefill or decode server.
            grammar: what every choice must match.
            kept_tokens: special tokens that are text all the same.
            timeout: seconds after ``arrival`` at which what still runs is ended; None is never.
        """
        self._engine: EngineClient = context.engine
        self._metrics: Metrics = context.metrics
        self._tracer = context.tracer
        self._arrival = arrival
        self._prompt_lengths = [len(prompt.token_ids) for prompt in prompts]
        self._submitted: set[str] = set()
        self._timeout = min(filter(None, (timeout, context.settings.request_timeout)), default=None)
        self._is_late = False
        self.choices: list[Choice] = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            for sample in range(n):
                index = len(self.choices)
                own = msgspec.structs.replace(sampling, n=1, seed=seed_of_choice(sampling.seed, sample))
                request = AddRequest(
                    request_id=f"{request_id}-{index}",
                    token_ids=prompt.token_ids,
                    sampling=own,
                    priority=priority,
                    grammar=grammar,
                    meeting=None if meetings is None else meetings[index],
                )
                detokenizer = context.detokenizer(
                    skip_special_tokens=own.skip_special_tokens, continues=True, kept=kept_tokens
                )
                output = TextOutput(own, detokenizer)
                self.choices.append(Choice(index, prompt, request, output))

    def usage(self) -> dict[str, object]:
        """Token counts so far."""
        return usage([choice.output for choice in self.choices], self._prompt_lengths)

    async def abort(self) -> None:
        """End every choice that the engine still runs. Idempotent."""
        while self._submitted:
            await self._engine.abort(self._submitted.pop())

    async def pieces(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Pieces of all choices in order of arrival; each choice ends with a finish reason.

        What runs when the time is over ends with the reason "abort"; before its first token that is an error.

        Leaving early and errors abort every choice that is still running. Call ``abort`` before cancelling.

        Raises:
            ApiError: the engine failed one of the choices, or the time was over before one began.
        """
        with self._time_limit():
            async with aclosing(self._merged()) as pieces:
                async for piece in pieces:
                    yield piece

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        if self._timeout is None:
            yield
            return
        left = max(0.0, self._arrival + self._timeout - time.perf_counter())
        task = asyncio.create_task(self._end_after(left))
        try:
            yield
        finally:
            task.cancel()

    async def _end_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._is_late = True
        for request_id in tuple(self._submitted):
            await self._engine.abort(request_id)

    async def _merged(self) -> AsyncGenerator[tuple[Choice, Piece], None]:
        if len(self.choices) == 1:
            choice = self.choices[0]
            async with aclosing(self._run(choice)) as run:
                async for piece in run:
                    yield choice, piece
            return
        queue: asyncio.Queue[tuple[Choice, Piece] | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(choice, queue)) for choice in self.choices]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                unfinished -= item[1].finish_reason is not None
        finally:
            await self.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, choice: Choice, queue: asyncio.Queue[tuple[Choice, Piece] | Exception]) -> None:
        try:
            async with aclosing(self._run(choice)) as run:
                async for piece in run:
                    queue.put_nowait((choice, piece))
        except Exception as error:
            queue.put_nowait(error)

    async def _run(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        """Pieces of one choice; sees to it that the engine's request ends and is counted once."""
        output, request_id = choice.output, choice.request.request_id
        self._submitted.add(request_id)
        clock = ChoiceClock(self._metrics, self._tracer, choice.request, self._arrival)
        failed = False
        stream = self._engine.stream(choice.request)
        try:
            async for delta in stream:
                clock.saw(delta)
                if delta.finish_reason is not None:
                    self._submitted.discard(request_id)
                if delta.finish_reason == "error":
                    raise _failure(delta)
                piece = output.push(delta)
                if piece.finish_reason == "abort" and self._is_late:
                    piece = self._late(piece, output)
                if piece.finish_reason is not None:
                    await self._abort_one(request_id)
                yield piece
                if piece.finish_reason is not None:
                    return
            raise ApiError(503, "the engine ended this request without a result", code="engine_error")
        except Exception:
            failed = True
            raise
        finally:
            await self._abort_one(request_id)
            if output.finish_reason not in (None, "abort"):
                clock.finished(output.finish_reason, output.completion_tokens)
            elif failed:
                clock.failed()
            else:
                clock.aborted()
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    def _late(self, piece: Piece, output: TextOutput) -> Piece:
        """The last piece of a choice whose time was over."""
        if output.completion_tokens:
            return piece._replace(stop_reason="timeout")
        raise ApiError(
            504,
            f"not begun within {self._timeout:g} seconds (timeout); try again later",
            param="timeout",
            code="timeout",
            headers={"Retry-After": "1"},
        )

    async def _abort_one(self, request_id: str) -> None:
        if request_id in self._submitted:
            self._submitted.discard(request_id)
            await self._engine.abort(request_id)


def _failure(delta: TokenDelta) -> ApiError:
    if delta.refused:
        return ApiError(400, str(delta.error), code="request_refused")
    if delta.peer_failed:
        return ApiError(502, str(delta.error), code="transfer_failed", headers={"Retry-After": "1"})
    return ApiError(500, f"the engine failed this request: {delta.error}", code="engine_error")
