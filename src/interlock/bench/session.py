"""A running engine as ``decode`` and ``prefill`` use it: give it a load, get back what was really run."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from interlock.engine.client import Engine
from interlock.engine.messages import AddRequest, Inspection, SamplingParams, StepRecord
from interlock.errors import RequestError
from interlock.moe.terms import Phase
from interlock.plan.launch_plan import LaunchPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of all replicas together.

    ``seconds``: from the end of the turn before to this one's, by the ranks' clocks. ``received``: when the
    last record of it reached the front end, on the machine's monotonic clock.
    """

    phase: Phase
    tokens: int
    sequences: int
    kv_tokens: int
    seconds: float
    received: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are sent together.

    Attributes:
        batch, steps: end all requests once that many decode steps ran with all of ``batch`` sequences;
            0 steps lets them run to their end.
        inspection: for tracing routes; never in a timed run.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    batch: int = 0
    steps: int = 0
    inspection: Inspection | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine did with a load, in order. Outputs are the generated tokens of each prompt."""

    turns: tuple[Turn, ...]
    outputs: tuple[tuple[int, ...], ...]
    cached_tokens: int = 0


class Session(Protocol):
    """A started engine. Calls block; ``close`` is idempotent.

    Attributes:
        plan: what it was started from.
        receipts: rank -> plan item -> what was observed.
    """

    plan: LaunchPlan
    receipts: dict[int, dict[str, object]]

    def run(self, load: Load) -> Observation:
        """Empty the prefix cache, then run ``load``. Raises RequestError for a request that is refused."""
        ...

    def close(self) -> None: ...


class TurnLog:
    """Joins the step records of the replicas into turns; turns that not all replicas told of are left out."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._open: dict[int, dict[int, StepRecord]] = {}
        self.turns: list[Turn] = []

    def add(self, replica: int, record: StepRecord, received: float) -> Turn | None:
        """The turn that ``record``, which arrived at ``received``, completes, if it does."""
        told = self._open.setdefault(record.turn, {})
        told[replica] = record
        if len(told) < self._replicas:
            return None
        del self._open[record.turn]
        parts = list(told.values())
        turn = Turn(
            phase=Phase(record.phase),
            tokens=sum(part.tokens for part in parts),
            sequences=sum(part.sequences for part in parts),
            kv_tokens=sum(part.kv_tokens for part in parts),
            seconds=max(part.ended for part in parts) - min(part.begun for part in parts),
            received=received,
        )
        self.turns.append(turn)
        return turn


class EngineSession:
    """A ``Session`` over real rank processes; its start refuses receipts that differ from the plan."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-session", daemon=True)
        self._thread.start()
        try:
            self._engine = self._call(Engine.start(plan))
        except BaseException:
            self._stop_loop()
            raise
        self.receipts = self._engine.receipts

    def run(self, load: Load) -> Observation:
        return self._call(_Run(self._engine, load).run())

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._engine.close())
            self._stop_loop()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Run:
    """One load on one engine."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._engine = engine
        self._load = load
        self._log = TurnLog(engine.plan.attn_dp_size)
        self._full = 0
        self._enough = asyncio.Event()
        self._ids = [uuid.uuid4().hex for _ in load.prompts]

    async def run(self) -> Observation:
        await self._engine.flush_cache()
        await self._engine.record_steps(self._note)
        ending = asyncio.create_task(self._end_early())
        try:
            work = zip(self._ids, self._load.prompts, strict=True)
            requests = [self._request(name, prompt) for name, prompt in work]
            answers = await asyncio.gather(*(self._answer(request) for request in requests))
        finally:
            ending.cancel()
            await self._engine.record_steps(None)
        return Observation(
            turns=tuple(self._log.turns),
            outputs=tuple(tokens for tokens, _ in answers),
            cached_tokens=sum(cached for _, cached in answers),
        )

    def _note(self, replica: int, record: StepRecord) -> None:
        turn = self._log.add(replica, record, time.monotonic())
        if turn is not None and turn.phase is Phase.DECODE and turn.sequences == self._load.batch:
            self._full += 1
            if self._load.steps and self._full >= self._load.steps:
                self._enough.set()

    async def _end_early(self) -> None:
        await self._enough.wait()
        for name in self._ids:
            await self._engine.abort(name)

    def _request(self, name: str, prompt: Sequence[int]) -> AddRequest:
        sampling = SamplingParams(temperature=0.0, max_tokens=self._load.max_tokens, ignore_eos=True)
        return AddRequest(
            request_id=name, token_ids=tuple(prompt), sampling=sampling, inspection=self._load.inspection
        )

    async def _answer(self, request: AddRequest) -> tuple[tuple[int, ...], int]:
        tokens: list[int] = []
        cached = 0
        async for delta in self._engine.stream(request):
            if delta.finish_reason == "error":
                raise RequestError(delta.error or "the engine refused the request")
            tokens += delta.token_ids
            cached = max(cached, delta.cached_tokens)
        return tuple(tokens), cached
