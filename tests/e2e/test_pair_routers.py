"""Two prefill and two decode servers behind ``interlock route`` and a third-party router: requests are spread
over both of each role, a dead server is taken out, and used again once it is back."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from interlock.engine.endpoints import free_ports
from tests.e2e.pair.clients import End, ask, bodies, streaming
from tests.e2e.pair.cluster import MODEL, SERVE
from tests.e2e.processes import READY, Process, Served, environment, running, wait_until

LETTERS = "the quick brown fox jumps over the lazy dog and on "
"""Prompts are texts: the third-party router takes no tokens."""
PEER_SECONDS = 5.0
REQUESTS = 24
FLAGS = ("--kv-memory", "64MiB", "--disaggregation-timeout", str(PEER_SECONDS), "--stall-timeout", "30")


@dataclass
class Fleet:
    """prefill0, prefill1, decode0 and decode1. ``due``: bodies and what one server answers."""

    stack: ExitStack
    due: list[tuple[dict[str, Any], End]]
    ports: dict[str, int] = field(default_factory=dict)
    servers: dict[str, Process] = field(default_factory=dict)

    def launch(self, name: str) -> None:
        flags = ["--port", str(self.ports[name]), "--disaggregation-mode", name[:-1]]
        if name.startswith("prefill"):
            flags += ["--disaggregation-bootstrap-port", str(self.ports[f"bootstrap{name[-1]}"])]
        process = Process([*SERVE, *MODEL, *FLAGS, *flags], env=environment())
        self.stack.callback(process.end)
        self.servers[name] = process

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def started(self, name: str) -> float:
        """Requests that a server has taken so far."""
        served = Served(self.servers[name], self.url(name))
        return served.metrics().get("interlock:requests_started_total", 0.0)

    def kill(self, name: str) -> None:
        for rank in self.servers[name].ranks():
            rank.kill()
        self.servers[name].wait()

    def ask(self, router: str, count: int = REQUESTS) -> Counter[str]:
        """How so many requests ended; a whole answer is one server's answer."""

        async def all_of_them() -> list[End]:
            gate = asyncio.Semaphore(4)

            async def one(index: int) -> End:
                body = self.due[index % len(self.due)][0]
                async with gate:
                    return await ask(router, streaming(body) if index % 2 else body, deadline=60)

            return list(await asyncio.gather(*(one(index) for index in range(count))))

        ends = asyncio.run(all_of_them())
        for index, end in enumerate(ends):
            assert end.kind in ("answer", "error"), end
            assert end.kind == "error" or end.same(self.due[index % len(self.due)][1])
        return Counter(end.kind for end in ends)

    def shares(self, router: str) -> dict[str, float]:
        """Requests that each living server got of ``REQUESTS`` that are all answered."""
        alive = [name for name, process in self.servers.items() if process.popen.poll() is None]
        before = {name: self.started(name) for name in alive}
        assert self.ask(router) == {"answer": REQUESTS}
        return {name: self.started(name) - before[name] for name in alive}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with running([*SERVE, *MODEL, "--kv-memory", "64MiB", "--port", "0"]) as process:
        url = process.wait_for(READY)[1]
        asked = [
            body | {"prompt": (LETTERS * 9)[index : index + len(body["prompt"])]}
            for index, body in enumerate(bodies(REQUESTS))
        ]
        due = [(body, asyncio.run(ask(url, body, deadline=60))) for body in asked]
    names = ("prefill0", "prefill1", "decode0", "decode1")
    with ExitStack() as stack:
        made = Fleet(stack, due)
        ports = free_ports("127.0.0.1", 6)
        made.ports = dict(zip((*names, "bootstrap0", "bootstrap1"), ports, strict=True))
        for name in names:
            made.launch(name)
        for name in names:
            made.servers[name].wait_for(READY)
        yield made


def ours(fleet: Fleet) -> str:
    arguments = ["-m", "interlock", "route", "--port", "0"]
    for index in range(2):
        arguments += ["--prefill", f"{fleet.url(f'prefill{index}')},{fleet.ports[f'bootstrap{index}']}"]
        arguments += ["--decode", fleet.url(f"decode{index}")]
    process = fleet.stack.enter_context(running(arguments))
    return process.wait_for(READY)[1]


def third_party(fleet: Fleet) -> str:
    if importlib.util.find_spec("sglang_router") is None:
        pytest.skip("sglang-router is not installed (pip install sglang-router)")
    (port,) = free_ports("127.0.0.1", 1)
    arguments = ["-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"]
    for index in range(2):
        arguments += ["--prefill", fleet.url(f"prefill{index}"), str(fleet.ports[f"bootstrap{index}"])]
        arguments += ["--decode", fleet.url(f"decode{index}")]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    arguments += ["--health-success-threshold", "1"]
    env = environment()
    env["PYTHONPATH"] = ":".join([env["PYTHONPATH"], *sys.path])
    process = Process(arguments, env=env)
    fleet.stack.callback(process.end)
    return f"http://127.0.0.1:{port}"


def answers(router: str, body: dict[str, Any]) -> bool:
    try:
        return httpx.post(f"{router}/v1/completions", json=body, timeout=20).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("route", [ours, third_party])
def test_a_fleet_is_balanced_and_survives_each_server(fleet: Fleet, route: Callable[[Fleet], str]) -> None:
    """Case H03 for routers: all requests are answered while one server of a role is dead."""
    router = route(fleet)
    body = fleet.due[0][0]
    wait_until(lambda: answers(router, body), "the router serves", 60)
    both = fleet.shares(router)
    print(route.__name__, "all alive", both)
    assert min(both.values()) >= REQUESTS / 4, both
    for name in list(fleet.servers):
        fleet.kill(name)
        begun = time.monotonic()
        at_once = fleet.ask(router, 6)
        wait_until(lambda: fleet.ask(router, 6) == {"answer": 6}, "the others serve", 60)
        taken_out = time.monotonic() - begun
        left = fleet.shares(router)
        twin = f"{name[:-1]}{1 - int(name[-1])}"
        assert left[twin] == REQUESTS
        fleet.launch(name)
        fleet.servers[name].wait_for(READY)
        begun = time.monotonic()
        wait_until(lambda name=name: fleet.ask(router, 6) and fleet.started(name) > 0, "it is used again", 60)
        back = time.monotonic() - begun
        print(
            f"{route.__name__}: {name} killed; next requests {dict(at_once)}, out after {taken_out:.1f} s, "
            f"back {back:.1f} s after it was ready"
        )
    again = fleet.shares(router)
    print(route.__name__, "all alive again", again)
    assert min(again.values()) >= REQUESTS / 4, again
