"""A prefill and a decode engine over real processes beside one engine, and what all of them say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from interlock.engine.client import Engine
from interlock.engine.endpoints import free_ports
from interlock.engine.messages import AddRequest, Meeting, SamplingParams, TokenDelta
from interlock.launch import plan_launch
from interlock.options import Options
from tests.engine.conftest import BASE

T = TypeVar("T")
TIMEOUT = 20.0


@dataclass
class Answer:
    """What a client of an engine got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[int]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    last: TokenDelta | None = None

    def add(self, delta: TokenDelta) -> None:
        self.tokens += delta.token_ids
        self.logprobs += [each.logprob for each in delta.logprobs]
        self.alternatives += [[token for token, _ in each.top] for each in delta.logprobs]
        self.prompt_logprobs += [each.logprob for each in delta.prompt_logprobs if each is not None]
        self.last = delta


@dataclass
class Pair:
    """One engine of each role, and one that does both."""

    plain: Engine
    prefill: Engine
    decode: Engine
    port: int
    rooms: int = 0

    async def ask(self, prompt: tuple[int, ...], sampling: SamplingParams, **more: Any) -> tuple[Answer, ...]:
        """The answers of the prefill and of the decode engine."""
        self.rooms += 1
        room = Meeting(host="127.0.0.1", port=self.port, room=self.rooms, choice=0)
        message = AddRequest(
            request_id=f"r{self.rooms}", token_ids=prompt, sampling=sampling, meeting=room, **more
        )
        first, second = await asyncio.gather(run(self.prefill, message), run(self.decode, message))
        return first, second

    async def expect(self, prompt: tuple[int, ...], sampling: SamplingParams, **more: Any) -> Answer:
        name = f"plain{random.getrandbits(60)}"
        return await run(self.plain, AddRequest(request_id=name, token_ids=prompt, sampling=sampling, **more))

    async def quiet(self) -> None:
        """Wait until no page is held by a request on either side."""
        for engine in (self.prefill, self.decode):
            for _ in range(600):
                if all(_used(stats) == 0 for stats in engine.stats()):
                    break
                await asyncio.sleep(0.02)
            assert [_used(stats) for stats in engine.stats()] == [0] * len(engine.stats())


def _used(stats: Any) -> int:
    full = stats.full_pages - stats.full_pages_free - stats.full_pages_cached
    return int(full + stats.window_pages - stats.window_pages_free - stats.window_pages_cached)


async def run(engine: Engine, message: AddRequest) -> Answer:
    answer = Answer()
    async for delta in engine.stream(message):
        answer.add(delta)
    return answer


class World:
    """One event loop, and the engines of both phases that were needed so far."""

    def __init__(self, model: Path, **options: object) -> None:
        self.model = model
        self._loop = asyncio.new_event_loop()
        self._base = {**BASE, **options}
        self._plain: dict[tuple[tuple[str, object], ...], Engine] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def start(self, **options: object) -> Engine:
        return await Engine.start(plan_launch(str(self.model), Options.of(**{**self._base, **options})))

    async def plain(self, **options: object) -> Engine:
        """An engine of both phases, with what earlier tests left in its cache."""
        key = tuple(sorted(options.items()))
        if key not in self._plain:
            self._plain[key] = await self.start(**options)
        return self._plain[key]

    @asynccontextmanager
    async def pair(
        self,
        prefill: dict[str, object],
        decode: dict[str, object],
        *,
        backend: str = "shared_memory",
        timeout: float = TIMEOUT,
        **both: object,
    ) -> AsyncIterator[Pair]:
        (port,) = free_ports("127.0.0.1", 1)
        both_roles = {
            "disaggregation_timeout": timeout,
            "disaggregation_queue_timeout": 60.0,
            "disaggregation_transfer_backend": backend,
            **both,
        }
        roles: Sequence[dict[str, object]] = (
            {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port, **prefill},
            {"disaggregation_mode": "decode", **decode},
        )
        plain = await self.plain(**both)
        async with AsyncExitStack() as stack:
            starts = (self.start(**{**both_roles, **role}) for role in roles)
            engines = await asyncio.gather(*starts, return_exceptions=True)
            for engine in engines:
                if isinstance(engine, Engine):
                    stack.push_async_callback(engine.close)
            for engine in engines:
                if isinstance(engine, BaseException):
                    raise engine
            first, second = engines
            assert isinstance(first, Engine)
            assert isinstance(second, Engine)
            yield Pair(plain, first, second, port)

    def close(self) -> None:
        for engine in self._plain.values():
            self.run(engine.close())
        self._loop.close()


def workload(seed: int, requests: int, longest: int = 220) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Random requests: cached prompts, one-token prompts, several chunks, few tokens, any sampling."""
    rng = random.Random(seed)
    made: list[tuple[tuple[int, ...], SamplingParams]] = []
    for index in range(requests):
        length = rng.choice([1, 15, 16, 17, 31, 32, 33, 64, rng.randint(1, longest)])
        prompt = tuple(rng.randrange(8, 480) for _ in range(length))
        if made and rng.random() < 0.4:
            earlier = rng.choice(made)[0]
            prompt = earlier + prompt[: rng.randint(0, max(0, longest - len(earlier)))]
        greedy = rng.random() < 0.5
        sampling = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, rng.randint(3, 16)]),
            temperature=0.0 if greedy else 0.8,
            seed=None if greedy else index,
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(8, 480), 3)),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 0]),
        )
        made.append((prompt, sampling))
    return made


def same(theirs: Answer, mine: Answer, *, tolerance: float = 1e-5) -> None:
    assert mine.last is not None
    assert theirs.last is not None
    assert mine.last.error is None
    assert mine.tokens == theirs.tokens
    assert mine.alternatives == theirs.alternatives
    assert mine.last.finish_reason == theirs.last.finish_reason
    assert mine.last.stop_token_id == theirs.last.stop_token_id
    for name in ("logprobs", "prompt_logprobs"):
        ours, due = getattr(mine, name), getattr(theirs, name)
        assert len(ours) == len(due)
        assert all(abs(a - b) < tolerance for a, b in zip(ours, due, strict=True))


async def compare(
    each: Pair,
    requests: list[tuple[tuple[int, ...], SamplingParams]],
    at_once: int = 4,
    tolerance: float = 1e-5,
) -> None:
    """Case H09 among others: first-token and prompt logprobs in mixed batches."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        async with gate:
            due = await each.expect(prompt, sampling)
            first, answer = await each.ask(prompt, sampling)
        same(due, answer, tolerance=tolerance)
        assert first.tokens == due.tokens[:1]

    await asyncio.gather(*(one(*request) for request in requests))
    await each.quiet()
