"""Prompts that are handed over at once reach the scheduler at once, and fill one step."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from interlock.bench.session import EngineSession, Load
from interlock.engine.client import Engine
from interlock.engine.messages import AddRequest, AddRequests, SamplingParams, ToEngine
from interlock.engine.outbox import MOST_TOKENS, Outbox
from interlock.launch import plan_launch
from interlock.moe.terms import Phase
from interlock.options import Options
from tests.engine.conftest import BASE

GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def request(name: str, tokens: int = 4) -> AddRequest:
    return AddRequest(request_id=name, token_ids=(7,) * tokens, sampling=GREEDY)


def names(message: AddRequest | AddRequests) -> list[str]:
    parts = message.requests if isinstance(message, AddRequests) else (message,)
    return [part.request_id for part in parts]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_what_is_added_in_one_turn_is_one_message(groups: list[int]) -> None:
    sent: list[AddRequest | AddRequests] = []

    async def run() -> None:
        outbox = Outbox(sent.append)
        for group, size in enumerate(groups):
            for index in range(size):
                outbox.add(request(f"{group}-{index}"))
            await asyncio.sleep(0)
            assert [name for message in sent for name in names(message)][-size:] == [
                f"{group}-{index}" for index in range(size)
            ] or not size

    asyncio.run(run())
    assert [len(names(message)) for message in sent] == [size for size in groups if size]
    for message in sent:
        assert isinstance(message, AddRequest) == (len(names(message)) == 1)
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine)
        assert copy == message


def test_a_message_has_a_bound() -> None:
    sent: list[AddRequest | AddRequests] = []

    async def run() -> None:
        outbox = Outbox(sent.append)
        for index in range(5):
            outbox.add(request(str(index), MOST_TOKENS // 2))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert [names(message) for message in sent] == [["0", "1"], ["2", "3"], ["4"]]


def test_flush_sends_before_the_turn_ends_and_only_once() -> None:
    sent: list[AddRequest | AddRequests] = []

    async def run() -> None:
        outbox = Outbox(sent.append)
        outbox.add(request("first"))
        outbox.flush()
        assert len(sent) == 1
        outbox.add(request("gone"))
        outbox.discard()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert [names(message) for message in sent] == [["first"]]


def test_a_list_of_prompts_is_one_full_chunk(tiny: Path) -> None:
    """Not a first step of one prompt, and a second of the rest."""
    options = {**BASE, "chunked_prefill_size": 128, "max_running_requests": 16, "prefix_cache": False}
    session = EngineSession(plan_launch(str(tiny), Options.of(**options)))
    try:
        for count, tokens, wanted in ((8, 16, [128]), (16, 12, [128, 64]), (3, 10, [30])):
            prompts = tuple(tuple(range(10, 10 + tokens)) for _ in range(count))
            for _ in range(3):
                observed = session.run(Load(prompts=prompts, max_tokens=1))
                steps = [turn.tokens for turn in observed.turns if turn.phase is Phase.PREFILL]
                assert steps == wanted
                assert all(len(output) == 1 for output in observed.outputs)
    finally:
        session.close()


def test_a_request_waits_for_a_rank_that_is_not_connected_yet(tmp_path: Path) -> None:
    """A rank's word that it is ready may overtake the connection that requests take."""

    async def run() -> ToEngine:
        context = zmq.asyncio.Context()
        address = f"ipc://{tmp_path}/input"
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.bind(address)
        client = SimpleNamespace(_inputs=[push], _encoder=msgspec.msgpack.Encoder())
        client._outboxes = [Outbox(partial(Engine._send_soon, client, 0))]
        client._outboxes[0].add(request("early"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pull.connect(address)
        try:
            received = await asyncio.wait_for(pull.recv(), timeout=30)
            return msgspec.msgpack.decode(received, type=ToEngine)
        finally:
            context.destroy(linger=0)

    assert names(asyncio.run(run())) == ["early"]
