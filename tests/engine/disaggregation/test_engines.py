"""A prefill and a decode engine over real processes against one engine: the same tokens and logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from interlock.engine.messages import SamplingParams
from interlock.structured.spec import GrammarSpec
from tests.engine.disaggregation.engines import TIMEOUT, Pair, World, compare, same, workload
from tests.kv.transfer.backends import NAMES, need


@pytest.fixture(scope="module")
def world(tiny: Path) -> Iterator[World]:
    made = World(tiny)
    yield made
    made.close()


@pytest.mark.parametrize("backend", NAMES)
def test_one_rank_each(world: World, backend: str) -> None:
    """Cases H09 and H11, a constrained answer, and a retracted request that is computed again."""
    need(backend)

    async def check() -> None:
        async with world.pair({"chunked_prefill_size": 32}, {}, backend=backend, deterministic=True) as each:
            await compare(each, workload(1, 24))
            again = workload(1, 6)
            await compare(each, again)
            spec = GrammarSpec(kind="regex", text="(yes|no), [0-9]{3}")
            sampling = SamplingParams(max_tokens=20, temperature=0.9, seed=3)
            due = await each.expect(tuple(range(8, 40)), sampling, grammar=spec)
            _, answer = await each.ask(tuple(range(8, 40)), sampling, grammar=spec)
            same(due, answer)
            assert len(answer.tokens) > 3
            await first_tokens_that_end(each)
            await told_by_transfers(each)

    world.run(check())


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
    same(due, answer)
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


ONE: dict[str, object] = {}
TWO: dict[str, object] = {"tp_size": 2}
EP: dict[str, object] = {"tp_size": 2, "attn_dp_size": 2}
COLLECTIVE: dict[str, object] = {**EP, "moe_a2a_backend": "collective"}
SHARED: dict[str, object] = {**EP, "moe_a2a_backend": "shared_memory"}
SIZES = [
    ("shared_memory", TWO, ONE, False),
    ("shared_memory", ONE, TWO, False),
    ("shared_memory", COLLECTIVE, SHARED, False),
    ("shared_memory", TWO, TWO, True),
    ("shared_memory", {"tp_size": 4}, TWO, True),
    ("shared_memory", TWO, {"tp_size": 4, "attn_dp_size": 1}, True),
    ("shared_memory", EP, ONE, True),
    (
        "shared_memory",
        {"tp_size": 2, "moe_a2a_backend": "shared_memory"},
        {"tp_size": 4, "attn_dp_size": 2, "moe_a2a_backend": "collective"},
        True,
    ),
    *((name, *sizes) for name in ("mooncake", "nixl") for sizes in (
        (TWO, ONE, False), (ONE, TWO, True), (TWO, TWO, True), (COLLECTIVE, SHARED, True),
    )),
]  # fmt: skip
"""Backend, the two servers, and whether it is a slow test."""


@pytest.mark.parametrize(
    ("backend", "prefill", "decode"),
    [pytest.param(*each, marks=[pytest.mark.slow] if slow else []) for *each, slow in SIZES],
)
def test_sizes_and_backends_may_differ(
    world: World, backend: str, prefill: dict[str, object], decode: dict[str, object]
) -> None:
    """Greedy answers: logprobs of other sizes differ by rounding, far less than tokens are apart."""
    need(backend)

    async def check() -> None:
        async with world.pair(prefill, decode, backend=backend) as each:
            requests = [
                (prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1))
                for prompt, _ in workload(2, 10, longest=120)
            ]
            await compare(each, requests)

    world.run(check())


@pytest.mark.slow
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(ONE, ONE, id="equal"),
        pytest.param(TWO, ONE, id="tp_2_to_1"),
        pytest.param(ONE, TWO, id="tp_1_to_2"),
        pytest.param(COLLECTIVE, SHARED, id="ep_collective_to_shared_memory"),
    ],
)
def test_many_random_requests(
    world: World, backend: str, prefill: dict[str, object], decode: dict[str, object]
) -> None:
    """Any sampling, several at once: with ``--deterministic`` bits depend on neither sizes nor backends."""
    need(backend)

    async def check() -> None:
        chunks = {"chunked_prefill_size": 32}
        async with world.pair({**chunks, **prefill}, decode, backend=backend, deterministic=True) as each:
            await compare(each, workload(4, 100), at_once=6)

    world.run(check())


@pytest.mark.parametrize("sizes", [(32, 16), (16, 16)])
def test_page_sizes_may_differ_where_the_window_allows(world: World, sizes: tuple[int, int]) -> None:
    """Case H10 over real engines."""

    async def check() -> None:
        prefill, decode = ({"page_size": size, "chunked_prefill_size": 64} for size in sizes)
        async with world.pair(prefill, decode, deterministic=True) as each:
            await compare(each, workload(3, 8))

    world.run(check())


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        ({"kv_cache_dtype": "bfloat16"}, ("--kv-cache-dtype", "float32", "bfloat16")),
        ({"page_size": 32}, ("--page-size", "16", "32")),
        ({"sliding_window_extra": 1}, ("window of layer",)),
    ],
)
def test_layouts_that_do_not_fit_are_refused_by_name(
    world: World, decode: dict[str, object], words: tuple[str, ...]
) -> None:
    """Case H02: an error with both values at once, no hang; a server that fits is served meanwhile."""

    async def check() -> None:
        async with world.pair({}, decode, timeout=2.0) as each:
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

    world.run(check())
