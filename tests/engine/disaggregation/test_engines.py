"""A prefill and a decode engine over real processes against one engine: the same tokens and logprobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlock.engine.client import Engine
from interlock.engine.endpoints import free_ports
from interlock.engine.messages import AddRequest, Meeting, SamplingParams, TokenDelta
from interlock.launch import plan_launch
from interlock.options import Options
from interlock.structured.spec import GrammarSpec
from tests.engine.conftest import BASE

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


@asynccontextmanager
async def pair(
    model: Path,
    prefill: dict[str, object],
    decode: dict[str, object],
    *,
    timeout: float = TIMEOUT,
    **both: object,
) -> AsyncIterator[Pair]:
    (port,) = free_ports("127.0.0.1", 1)
    common = {**BASE, **both}
    timeouts = {"disaggregation_timeout": timeout, "disaggregation_queue_timeout": 60.0}
    roles: list[dict[str, object]] = [
        {},
        {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port, **timeouts, **prefill},
        {"disaggregation_mode": "decode", **timeouts, **decode},
    ]
    async with AsyncExitStack() as stack:
        engines = []
        for options in roles:
            engine = await Engine.start(plan_launch(str(model), Options.of(**{**common, **options})))
            stack.push_async_callback(engine.close)
            engines.append(engine)
        yield Pair(*engines, port)


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


def same(theirs: Answer, mine: Answer, sampling: SamplingParams) -> None:
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
        assert all(abs(a - b) < 1e-5 for a, b in zip(ours, due, strict=True))


async def compare(
    each: Pair, requests: list[tuple[tuple[int, ...], SamplingParams]], at_once: int = 4
) -> None:
    """Case H09 among others: first-token and prompt logprobs in mixed batches."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        async with gate:
            due = await each.expect(prompt, sampling)
            first, answer = await each.ask(prompt, sampling)
        same(due, answer, sampling)
        assert first.tokens == due.tokens[:1]

    await asyncio.gather(*(one(*request) for request in requests))
    await each.quiet()


def test_one_rank_each(tiny: Path) -> None:
    """Cases H09 and H11, a constrained answer, and a retracted request that is computed again."""

    async def check() -> None:
        async with pair(tiny, {"chunked_prefill_size": 32}, {}, deterministic=True) as each:
            await compare(each, workload(1, 24))
            again = workload(1, 6)
            await compare(each, again)
            spec = GrammarSpec(kind="regex", text="(yes|no), [0-9]{3}")
            sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=3)
            due = await each.expect(tuple(range(8, 40)), sampling, grammar=spec)
            _, answer = await each.ask(tuple(range(8, 40)), sampling, grammar=spec)
            same(due, answer, sampling)
            assert len(answer.tokens) > 3
            await first_tokens_that_end(each)
            await told_by_transfers(each)

    asyncio.run(check())


async def first_tokens_that_end(each: Pair) -> None:
    """The first token is the prefill server's to draw, and the decode server's to judge."""
    prompt = tuple(range(8, 57))
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    stop = (await each.expect(prompt, plain)).tokens[0]
    await compare(
        each,
        [
            (prompt, msgspec.structs.replace(plain, **changes))
            for changes in (
                {"stop_token_ids": (stop,)},
                {"stop_token_ids": (stop,), "min_tokens": 2},
                {"max_tokens": 1},
                {"max_tokens": 0},
                {"max_tokens": 0, "prompt_logprobs": None},
                {"logit_bias": {stop: -100.0}},
            )
        ],
    )
    sampling = SamplingParams(max_tokens=6, temperature=1, seed=1)
    spec = GrammarSpec(kind="regex", text="[a-z]")
    due = await each.expect(prompt, sampling, grammar=spec)
    _, answer = await each.ask(prompt, sampling, grammar=spec)
    same(due, answer, sampling)
    assert answer.last is not None
    assert answer.last.finish_reason == "stop"


async def told_by_transfers(each: Pair) -> None:
    """What both sides count agrees, and nothing is left."""
    await each.quiet()
    (prefill,), (decode,) = ([s.transfer for s in engine.stats()] for engine in (each.prefill, each.decode))
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.peers == decode.peers == 1
    assert prefill.handed_over_total == decode.handed_over_total > 30
    assert prefill.failed_total == decode.failed_total == 0
    assert prefill.tokens_total == decode.tokens_total > 0
    assert prefill.copies_total > 0
    assert prefill.bytes_total > prefill.tokens_total
    assert prefill.seconds_total > 0
    for each_side in (prefill, decode):
        assert each_side.states == {}
        assert each_side.pages_held == each_side.pages_quarantined == each_side.copies_pending == 0


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp_size": 2}, {}),
        ({}, {"tp_size": 2}),
        pytest.param({"tp_size": 2}, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 4}, {"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, {"tp_size": 4, "attn_dp_size": 1}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "attn_dp_size": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "collective"},
            {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory"},
        ),
        pytest.param(
            {"tp_size": 2, "moe_a2a_backend": "shared_memory"},
            {"tp_size": 4, "attn_dp_size": 2, "moe_a2a_backend": "collective"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sizes_and_backends_may_differ(
    tiny: Path, prefill: dict[str, object], decode: dict[str, object]
) -> None:
    """Greedy answers: logprobs of other sizes differ by rounding, far less than tokens are apart."""

    async def check() -> None:
        async with pair(tiny, prefill, decode) as each:
            requests = [
                (prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1))
                for prompt, _ in workload(2, 10, longest=120)
            ]
            await compare(each, requests)

    asyncio.run(check())


@pytest.mark.parametrize("sizes", [(32, 16), (16, 16)])
def test_page_sizes_may_differ_where_the_window_allows(tiny: Path, sizes: tuple[int, int]) -> None:
    """Case H10 over real engines."""

    async def check() -> None:
        prefill, decode = ({"page_size": size, "chunked_prefill_size": 64} for size in sizes)
        async with pair(tiny, prefill, decode, deterministic=True) as each:
            await compare(each, workload(3, 8))

    asyncio.run(check())


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({"kv_cache_dtype": "bfloat16"}, ("--kv-cache-dtype", "float32", "bfloat16")),
        ({"page_size": 32}, ("--page-size", "16", "32")),
        ({"sliding_window_extra": 1}, ("window of layer",)),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(
    tiny: Path, decode: dict[str, object], words: tuple[str, ...]
) -> None:
    """Case H02: an error with both values at once, no hang; a server that fits is served meanwhile."""

    async def check() -> None:
        async with pair(tiny, {}, decode, timeout=2.0) as each:
            sampling = SamplingParams(max_tokens=4, temperature=0)
            answers = each.ask(tuple(range(8, 40)), sampling)
            first, second = await asyncio.wait_for(answers, TIMEOUT + 10)
            assert second.last is not None
            assert second.last.peer_failed
            for word in words:
                assert word in (second.last.error or "")
            assert first.last is not None
            assert first.last.finish_reason == "error"
            await each.quiet()

    asyncio.run(check())
