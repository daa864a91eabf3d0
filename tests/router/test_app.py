"""The development proxy in front of servers that die, fall silent, refuse or drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from interlock.router import pool
from tests.router.stubs import PATH, Stub, routed

BODY = {"model": "m", "prompt": "x"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(pool, "LOST_SECONDS", 0.3)


async def fine(body: dict[str, Any]) -> Response:
    return JSONResponse({"ok": True})


async def never(body: dict[str, Any]) -> Response:
    await asyncio.sleep(3600)
    raise AssertionError


def refusing(status: int, message: str) -> Callable[[dict[str, Any]], Awaitable[Response]]:
    async def answer(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": message}}, status)

    return answer


def breaking(after: int) -> Callable[[dict[str, Any]], Awaitable[Response]]:
    """A stream that hangs after so many events."""

    async def chunks() -> AsyncIterator[bytes]:
        for index in range(after):
            yield b'data: {"choices": [{"text": "%d"}]}\n\n' % index
        await asyncio.sleep(3600)

    async def answer(body: dict[str, Any]) -> Response:
        return StreamingResponse(chunks(), media_type="text/event-stream")

    return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_servers_take_turns_and_each_room_is_used_once() -> None:
    async def check() -> None:
        prefill, decode = [Stub(fine), Stub(fine)], [Stub(fine), Stub(fine)]
        async with routed(prefill, decode) as client:
            answers = await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert [stub.counts["asked"] for stub in (*prefill, *decode)] == [10] * 4
        rooms = [stub.rooms for stub in (*prefill, *decode)]
        assert len({*rooms[0], *rooms[1]}) == 20
        assert {*rooms[0], *rooms[1]} == {*rooms[2], *rooms[3]}

    asyncio.run(check())


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("status", [503, 0])
def test_a_server_that_is_not_ready_is_passed_over_until_it_is(role: int, status: int) -> None:
    """A server that drains, or says nothing."""

    async def check() -> None:
        stubs = [[Stub(fine), Stub(fine)], [Stub(fine), Stub(fine)]]
        out = stubs[role][1]
        out.ready = status
        async with routed(*stubs) as client:
            if status == 0:
                await asyncio.sleep(0.4)
            else:
                await asyncio.sleep(0.1)
            for _ in range(6):
                assert (await client.post(PATH, json=BODY)).status_code == 200
            assert out.counts["asked"] == 0
            out.ready = 200
            await asyncio.sleep(0.4)
            for _ in range(6):
                assert (await client.post(PATH, json=BODY)).status_code == 200
            assert out.counts["asked"] == 3

    asyncio.run(check())


@pytest.mark.parametrize("role", [0, 1])
def test_a_dead_server_costs_no_request(role: int) -> None:
    async def check() -> None:
        stubs = [[Stub(fine), Stub(fine)], [Stub(fine), Stub(fine)]]
        async with routed(*stubs) as client:
            assert stubs[role][0].stop is not None
            await stubs[role][0].stop()
            answers = await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(10)))
            assert {answer.status_code for answer in answers} == {200}
            assert stubs[role][1].stop is not None
            await stubs[role][1].stop()
            answer = await client.post(PATH, json=BODY)
        assert answer.status_code == 503
        assert f"no {('prefill', 'decode')[role]} server answers" in answer.text

    asyncio.run(check())


def test_a_prefill_answer_that_begins_late_is_read_to_its_end() -> None:
    """The decode server's answer begins at once; to close the other one would abort what it waits for."""
    ended: list[bool] = []

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b'data: {"choices": []}\n\n'
            await asyncio.sleep(0.05)

    async def late(body: dict[str, Any]) -> Response:
        async def read() -> AsyncIterator[bytes]:
            async for chunk in chunks(4):
                yield chunk
            ended.append(True)

        await asyncio.sleep(0.1)
        return StreamingResponse(read(), media_type="text/event-stream")

    async def at_once(body: dict[str, Any]) -> Response:
        return StreamingResponse(chunks(10), media_type="text/event-stream")

    async def check() -> None:
        async with routed([Stub(late)], [Stub(at_once)]) as client:
            for _ in range(3):
                answer = await client.post(PATH, json=BODY)
                assert answer.text.count("data: ") == 10

    asyncio.run(check())
    assert ended == [True] * 3


def test_a_stream_that_breaks_off_ends_with_one_error() -> None:
    async def check() -> None:
        decode = Stub(breaking(3))
        async with routed([Stub(fine)], [decode]) as client:
            lines, ends = [], []
            async with client.stream("POST", PATH, json=BODY) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len([line for line in lines if line]) == 3:
                        assert decode.stop is not None
                        ends.append(asyncio.ensure_future(decode.stop()))
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        (error,) = [json.loads(event)["error"] for event in events[3:-1]]
        assert f"the decode server {decode.url} died" in error["message"]
        assert error["type"] == "server_error"

    asyncio.run(check())


@pytest.mark.parametrize("after", [0, 2])
def test_a_decode_server_that_falls_silent_is_given_up(after: int) -> None:
    """Stopped, or cut off: no connection breaks, and nothing comes."""

    async def check() -> None:
        decode = Stub(breaking(after) if after else never)
        async with routed([Stub(fine)], [decode]) as client:
            asking = asyncio.ensure_future(client.post(PATH, json=BODY))
            await until(lambda: decode.counts["asked"] == 1)
            decode.ready = 0
            answer = await asyncio.wait_for(asking, 10)
        message = f"the decode server {decode.url} does not answer any more"
        assert message in answer.text
        assert answer.status_code == (200 if after else 502)
        assert answer.text.endswith("data: [DONE]\n\n") or not after

    asyncio.run(check())


def test_a_decode_server_that_drains_may_finish() -> None:
    """It says that it is not ready, and goes on with what it has."""

    async def slow(body: dict[str, Any]) -> Response:
        await asyncio.sleep(0.8)
        return JSONResponse({"ok": True})

    async def check() -> None:
        decode = Stub(slow)
        async with routed([Stub(fine)], [decode]) as client:
            asking = asyncio.ensure_future(client.post(PATH, json=BODY))
            await until(lambda: decode.counts["asked"] == 1)
            decode.ready = 503
            assert (await asking).status_code == 200

    asyncio.run(check())


def test_what_the_prefill_server_refuses_is_told_at_once() -> None:
    async def check() -> None:
        decode = Stub(never)
        async with routed([Stub(refusing(429, "too many requests"))], [decode]) as client:
            answer = await client.post(PATH, json=BODY)
            assert answer.status_code == 429
            assert "too many" in answer.text
            await until(lambda: decode.counts["gone"] == 1)

    asyncio.run(check())


def test_the_decode_servers_words_come_first() -> None:
    async def late(body: dict[str, Any]) -> Response:
        await asyncio.sleep(0.1)
        return JSONResponse({"error": {"message": "the cache is full"}}, 502)

    async def check() -> None:
        async with routed([Stub(refusing(502, "it was given up"))], [Stub(late)]) as client:
            assert "the cache is full" in (await client.post(PATH, json=BODY)).text

    asyncio.run(check())


def test_a_client_that_goes_away_ends_both_requests() -> None:
    """Case H06: also before anything was answered."""

    async def check() -> None:
        prefill, decode = Stub(never), Stub(never)
        async with routed([prefill], [decode]) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(PATH, json=BODY, timeout=0.2)
            await until(lambda: prefill.counts["gone"] == decode.counts["gone"] == 1)

    asyncio.run(check())


@pytest.mark.parametrize("content", [b"", b"[1]", b"{"])
def test_a_body_that_is_no_object_is_refused(content: bytes) -> None:
    async def check() -> None:
        prefill = Stub(fine)
        async with routed([prefill], [Stub(fine)]) as client:
            assert (await client.post(PATH, content=content)).status_code == 400
        assert not prefill.counts

    asyncio.run(check())
