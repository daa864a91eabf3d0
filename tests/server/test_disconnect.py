"""Clients that go away: the engine hears of it at every stage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 100, "ignore_eos": True}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_and_close(base_url: str, body: dict[str, Any], ready: Callable[[], bool], path: str) -> None:
    """Send a request, wait until ``ready``, close the socket without reading the answer to its end."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            task = asyncio.create_task(client.post(path, json=body))
            await asyncio.to_thread(wait_for, ready)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stage", ["queued", "decoding"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_choice_is_aborted(
    base_url: str, engine: FakeEngine, stage: str, n: int, stream: bool, path: str
) -> None:
    """F08: queued or decoding, streamed or not, one choice or four: all are aborted once and forgotten."""
    engine.script("", eos=False, delay=0.1, hold=stage == "queued")
    body: dict[str, Any] = {**LONG, "n": n, "stream": stream}
    if path.endswith("chat/completions"):
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "x"}]

    def ready() -> bool:
        return len(engine.live) == n and (stage == "queued" or len(engine.emitted) == n)

    open_and_close(base_url, body, ready, path)
    wait_for(lambda: not engine.live)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert len(engine.requests) == n
    assert max(engine.emitted.values(), default=0) < 100


def test_others_are_not_disturbed(base_url: str, engine: FakeEngine) -> None:
    """F08: one client's end leaves the streams of others complete."""
    engine.script("abcdef", eos=True, delay=0.02)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            body = {"model": "tiny", "prompt": "x", "stream": True}
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
            await asyncio.to_thread(wait_for, lambda: len(engine.emitted) == 8)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [task.result() for task in tasks[1::2]]

    for answer in asyncio.run(main()):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count('"finish_reason":"stop"') == 1
    wait_for(lambda: not engine.live)


def test_a_client_that_leaves_while_sending(base_url: str, engine: FakeEngine, http: httpx.Client) -> None:
    """F08: a half-sent body reaches no engine and disturbs nobody."""
    import socket

    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"model": "ti'.encode())
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 200
    assert len(engine.requests) == 1
