"""The offline engine: ``LLM("demo").generate(...)`` runs what ``interlock serve`` runs, without HTTP."""

from __future__ import annotations

import asyncio
import operator
import threading
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec

from interlock.engine.client import Engine
from interlock.engine.messages import AddRequest, SamplingParams, TokenLogprob
from interlock.errors import RequestError
from interlock.launch import plan_launch
from interlock.options import Options
from interlock.plan.launch_plan import LaunchPlan
from interlock.server.text_output import Piece, TextOutput
from interlock.structured.checker import GrammarChecker
from interlock.structured.compiler import GrammarError
from interlock.structured.grammar import Grammar
from interlock.structured.spec import GrammarSpec
from interlock.tokenizer import Detokenizer, load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. ``logprobs`` has an entry for each token when they were asked for."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0


class LLM:
    """A model that answers from Python. Use as a context manager, or call ``close``.

    Args:
        model: "demo", "tiny-random", or the folder of a checkpoint.
        options: any option of ``interlock serve``, in Python's spelling (``tp_size=2``).

    Raises:
        Refusal: the options cannot be served here.
        StartupError: the engine failed, or an option did not take effect.
    """

    def __init__(self, model: str, **options: object) -> None:
        self.plan: LaunchPlan = plan_launch(model, Options.of(**options))
        self.tokenizer = load_tokenizer(self.plan.model_path)
        self._grammars = GrammarChecker(self.plan)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="interlock-llm", daemon=True)
        self._thread.start()
        try:
            self.engine = self._run(Engine.start(self.plan))
        except BaseException:
            self._stop_loop()
            raise

    @property
    def receipts(self) -> dict[int, dict[str, object]]:
        """Rank -> plan item -> what that rank observed at start-up."""
        return self.engine.receipts

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> list[Completion]:
        """Answer all prompts together; texts or token ids, one ``Completion`` each, in order.

        ``sampling.n`` must be 1: repeat a prompt to get several answers.

        Args:
            grammar: what every answer must match (``Grammar.json_schema({...})``, ``.regex``, ``.ebnf``).

        Raises:
            RequestError: a prompt cannot be served, or ``grammar`` does not compile.
            EngineDeadError: the engine died.
        """
        sampling = sampling or SamplingParams()
        if sampling.n != 1:
            raise RequestError("LLM.generate takes n = 1; repeat a prompt to get several answers")
        batch: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        spec = None if grammar is None else self._run(self._checked(grammar))
        requests = [
            AddRequest(
                request_id=uuid.uuid4().hex,
                token_ids=tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else _ids(prompt),
                sampling=sampling,
                grammar=spec,
            )
            for prompt in batch
        ]
        for request in requests:
            _check(request)
        return self._run(self._gather(requests))

    def chat(self, messages: list[dict[str, Any]], sampling: SamplingParams | None = None) -> Completion:
        """Answer a conversation through the model's chat template."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([token_ids], sampling)[0]

    def close(self) -> None:
        """Stop the engine; idempotent."""
        if self._thread.is_alive():
            self._grammars.close()
            self._run(self.engine.close())
            self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _checked(self, grammar: Grammar) -> GrammarSpec:
        try:
            await self._grammars.check(grammar.spec)
        except GrammarError as error:
            raise RequestError(f"the grammar cannot be used: {error}", param="grammar") from None
        return grammar.spec

    async def _gather(self, requests: list[AddRequest]) -> list[Completion]:
        return list(await asyncio.gather(*(self._complete(request) for request in requests)))

    async def _complete(self, request: AddRequest) -> Completion:
        sampling = request.sampling
        output = TextOutput(sampling, Detokenizer(self.tokenizer, sampling.skip_special_tokens))
        tokens: list[int] = []
        pieces: list[Piece] = []
        async for delta in self.engine.stream(request):
            if delta.finish_reason == "error":
                raise RequestError(delta.error or "the engine refused the request")
            tokens += delta.token_ids
            pieces.append(output.push(delta))
            if output.finish_reason is not None:
                break
        return Completion(
            token_ids=tuple(tokens[: output.completion_tokens]),
            text="".join(piece.text for piece in pieces),
            finish_reason=output.finish_reason or "",
            logprobs=tuple(token.logprob for piece in pieces for token in piece.tokens),
            prompt_logprobs=output.prompt_logprobs,
            prompt_tokens=len(request.token_ids),
            cached_tokens=output.cached_tokens,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Token ids as Python's own integers, out of a list or an array."""
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise RequestError(f"a prompt is a text or a list of token ids: {error}", param="prompt") from None


def _check(request: AddRequest) -> None:
    """Whether a scheduler could read it: Python hands over anything, and nobody would answer."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=AddRequest)
    except (OverflowError, TypeError, msgspec.ValidationError) as error:
        raise RequestError(f"prompt or sampling parameters are no request: {error}") from None
