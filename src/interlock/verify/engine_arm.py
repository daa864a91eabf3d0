"""An arm that this process starts: rank processes as ``interlock serve`` runs them, without HTTP."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from interlock.engine.client import Engine
from interlock.engine.messages import AddRequest, SamplingParams, TokenLogprob
from interlock.errors import InterlockError
from interlock.plan.launch_plan import LaunchPlan
from interlock.verify.arm import ArmError, Ask, Scored

T = TypeVar("T")


class EngineArm:
    """See ``Arm``. The engine's start already refuses when a receipt differs from the plan."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan: LaunchPlan | None = plan
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verify-arm", daemon=True)
        self._thread.start()
        try:
            self._engine = self._run(Engine.start(plan))
        except BaseException as error:
            self._stop()
            if isinstance(error, InterlockError):
                raise ArmError(f"did not start: {error}") from None
            raise
        self.receipts = self._engine.receipts

    def score(self, ask: Ask) -> Scored:
        try:
            return self._run(self._score(ask))
        except InterlockError as error:
            raise ArmError(str(error)) from None

    def close(self) -> None:
        if self._thread.is_alive():
            self._run(self._engine.close())
            self._stop()

    async def _score(self, ask: Ask) -> Scored:
        if ask.flush:
            await self._engine.flush_cache()
        request = add_request(ask)
        replica = ask.turn % self._engine.plan.attn_dp_size
        deltas = [delta async for delta in self._engine.stream(request, replica=replica)]
        last = deltas[-1]
        if last.finish_reason == "error":
            raise ArmError(last.error or "the engine refused the request")
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        prompt: tuple[TokenLogprob | None, ...] = deltas[0].prompt_logprobs or (None,) * len(ask.token_ids)
        return Scored(
            token_ids=ask.token_ids + tokens,
            prompt_len=len(ask.token_ids),
            entries=prompt + tuple(entry for delta in deltas for entry in delta.logprobs),
            chunk_ends=deltas[0].chunk_ends,
            cached_tokens=last.cached_tokens,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def add_request(ask: Ask) -> AddRequest:
    """The engine's request for ``ask``."""
    return AddRequest(
        request_id=uuid.uuid4().hex,
        token_ids=ask.token_ids,
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=len(ask.forced) or ask.continuation,
            ignore_eos=True,
            forced_token_ids=ask.forced,
            logprobs=ask.alternatives,
            prompt_logprobs=ask.alternatives if ask.score_prompt else None,
        ),
        inspection=ask.inspection,
    )
