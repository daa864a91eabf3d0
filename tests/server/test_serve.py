"""Start and end of the HTTP server."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from interlock.errors import StartupError
from interlock.server.app import create_app
from interlock.server.serve import listen, make_server
from interlock.server.settings import ServerSettings
from interlock.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine


def test_port_in_use_is_a_user_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"{port}.*--port"):
            listen("127.0.0.1", port)


def test_unknown_host_is_a_user_error() -> None:
    with pytest.raises(StartupError, match="--host"):
        listen("no.such.host.invalid", 0)


@pytest.mark.parametrize("long_answer", [False, True])
def test_drain(tokenizer: Tokenizer, long_answer: bool) -> None:
    """J04: told to end, the server refuses new connections and finishes running streams; it cuts
    those that outlast the grace time."""
    engine = FakeEngine()
    engine.script("abcdef" * (10 if long_answer else 1), delay=0.2 if long_answer else 0.05)

    async def main() -> str:
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)))
        server = make_server(app, cut_seconds=1)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        text = ""
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 60}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                try:
                    async for line in answer.aiter_lines():
                        text += line
                        server.should_exit = True
                except httpx.RemoteProtocolError:
                    text += "<cut>"
            await running
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
        return text

    text = asyncio.run(main())
    assert ("[DONE]" in text) == (not long_answer)
    assert engine.live == set()
