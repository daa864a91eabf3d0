"""Prefill and decode servers as a user starts them, behind ``interlock route`` and a third-party router."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from interlock.engine.endpoints import free_ports
from tests.e2e.processes import BASE, READY, SERVE, Process, Served, environment, running, wait_until

TIMEOUT = 6
LETTERS = "the quick brown fox jumps over the lazy dog and on "


@dataclass
class Cluster:
    """A server that does both phases, one of each role, and the proxy in front of those."""

    stack: ExitStack
    plain: Served
    bootstrap_port: int
    ports: dict[str, int]
    servers: dict[str, Served]
    proxy: str
    backend: str = "shared_memory"

    def start(self, role: str) -> Served:
        """Start (again) the server of a role, on the port it had."""
        flags = ["--disaggregation-mode", role, "--disaggregation-timeout", str(TIMEOUT)]
        flags += ["--disaggregation-transfer-backend", self.backend]
        if role == "prefill":
            flags += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        arguments = [*SERVE, *BASE, "--port", str(self.ports[role]), *flags]
        process = self.stack.enter_context(running(arguments))
        self.servers[role] = Served(process, process.wait_for(READY)[1])
        return self.servers[role]

    def both(self, body: dict[str, Any], *, room: int) -> dict[str, Any]:
        """The body with a room, for asking the servers without a router."""
        return body | {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }

    def wait_free(self) -> None:
        """No page is held by a request on either side."""
        for served in self.servers.values():
            wait_until(lambda served=served: used_pages(served) == 0, "no page is held", TIMEOUT * 3 + 5)

    def wait_routed(self) -> None:
        """The proxy knows both as alive."""
        wait_until(lambda: httpx.get(f"{self.proxy}/health").status_code == 200, "the proxy is healthy", 20)


def used_pages(served: Served) -> float:
    """Pages that requests hold, of both spaces."""
    metrics = served.metrics()
    names = ("interlock:kv_pages", "interlock:kv_pages_free", "interlock:kv_pages_cached")
    total, free, cached = (metrics[name] for name in names)
    return total - free - cached


@contextmanager
def clustered(backend: str) -> Iterator[Cluster]:
    prefill, decode, bootstrap = free_ports("127.0.0.1", 3)
    with ExitStack() as stack:
        process = stack.enter_context(running([*SERVE, *BASE, "--port", "0"]))
        ports = {"prefill": prefill, "decode": decode}
        made = Cluster(stack, Served(process, ""), bootstrap, ports, {}, "", backend)
        made.start("prefill")
        made.start("decode")
        made.plain = Served(process, process.wait_for(READY)[1])
        made.proxy = proxy_of(made)
        made.wait_routed()
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clustered("shared_memory") as made:
        yield made


def proxy_of(cluster: Cluster) -> str:
    servers = [
        *("--prefill", f"{cluster.servers['prefill'].url},{cluster.bootstrap_port}"),
        *("--decode", cluster.servers["decode"].url),
    ]
    process = cluster.stack.enter_context(running(["-m", "interlock", "route", *servers, "--port", "0"]))
    return process.wait_for(READY)[1]


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what is new in every answer or hangs on what a cache held before; floats as a router's own
    JSON may round them."""
    new = ("id", "created", "system_fingerprint")
    kept = {name: value for name, value in answer.items() if name not in new}
    if kept.get("usage"):
        kept["usage"] = {k: v for k, v in kept["usage"].items() if k != "prompt_tokens_details"}
    return json.loads(json.dumps(kept), parse_float=lambda text: round(float(text), 6))


def completion(words: int, **fields: Any) -> dict[str, Any]:
    prompt = (LETTERS * 9)[: 3 * words]
    return {"model": "tiny-random", "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields


CHAT = {
    "model": "tiny-random",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
    "logprobs": True,
    "top_logprobs": 4,
    "temperature": 0,
}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion(1, logprobs=4)),
    ("/v1/completions", completion(30, logprobs=4, echo=True)),
    ("/v1/completions", completion(70, max_tokens=1)),
    ("/v1/completions", completion(70, max_tokens=12, ignore_eos=True, logprobs=1)),
    ("/v1/completions", completion(5, n=3, seed=7, temperature=1)),
    ("/v1/completions", completion(5, prompt=["hello", "world"], n=2, seed=7, temperature=1)),
    ("/v1/completions", completion(9, stop=["e"], max_tokens=20)),
    ("/v1/completions", completion(9, guided_regex="(yes|no)[0-9]{4}", max_tokens=20)),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1, "seed": 3}),
]
OURS_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", completion(9, prompt=[9, 10, 11] * 30, prompt_logprobs=1, logprobs=0)),
    ("/v1/completions", completion(9, max_tokens=0, echo=True, logprobs=1)),
]


def compare(cluster: Cluster, router: str, path: str, body: dict[str, Any]) -> None:
    due = httpx.post(cluster.plain.url + path, json=body, timeout=60)
    answer = httpx.post(router + path, json=body, timeout=60)
    assert answer.status_code == due.status_code == 200, answer.text
    assert bare(answer.json()) == bare(due.json())


def streamed(url: str, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What each choice streamed, joined: how choices take turns, and how many tokens an event holds, is
    nobody's promise."""
    found: dict[int, dict[str, Any]] = {}
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    for line in lines:
        event = bare(json.loads(line[6:]))
        assert "choices" in event, line
        for choice in event["choices"]:
            joined = found.setdefault(choice["index"], {"text": "", "scores": [], "end": None})
            joined["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            scores = choice.get("logprobs") or {}
            joined["scores"] += scores.get("content") or scores.get("token_logprobs") or []
            joined["end"] = choice["finish_reason"] or joined["end"]
    assert found
    assert all(joined["end"] for joined in found.values())
    return found


@pytest.mark.parametrize(("path", "body"), [*REQUESTS, *OURS_ONLY])
def test_the_same_answer_through_our_proxy(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    """Case H09 over HTTP."""
    compare(cluster, cluster.proxy, path, body)


@pytest.mark.parametrize("index", [0, 3, 4, 8])
def test_the_same_stream_through_our_proxy(cluster: Cluster, index: int) -> None:
    path, body = REQUESTS[index]
    assert streamed(cluster.proxy + path, body) == streamed(cluster.plain.url + path, body)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_without_a_room_is_told_what_is_missing(cluster: Cluster, role: str) -> None:
    answer = cluster.servers[role].post("/v1/completions", completion(3))
    assert answer.status_code == 400
    assert f"this is a {role} server" in answer.json()["error"]["message"]
    refused = cluster.plain.post("/v1/completions", cluster.both(completion(3), room=1))
    assert refused.status_code == 400
    assert "neither a prefill nor a decode" in refused.json()["error"]["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_half_a_request_ends_in_time(cluster: Cluster, role: str) -> None:
    begun = time.monotonic()
    answer = cluster.servers[role].post("/v1/completions", cluster.both(completion(9), room=77))
    assert answer.status_code == 502
    assert "the other half" in answer.text or "the prefill server to have" in answer.text
    assert time.monotonic() - begun < TIMEOUT + 10
    cluster.wait_free()


def test_a_prefill_server_that_is_not_there(cluster: Cluster) -> None:
    """Case H03: nobody listens at the bootstrap port that the request names."""
    body = cluster.both(completion(9), room=78) | {"bootstrap_port": free_ports("127.0.0.1", 1)[0]}
    answer = cluster.servers["decode"].post("/v1/completions", body)
    assert answer.status_code == 502
    assert "prefill server 127.0.0.1:" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "transfer_failed"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1",
        b"\x00\x00\x00\x00",
        b"",
    ],
)
def test_garbage_at_the_bootstrap_port_is_cut_off(cluster: Cluster, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", cluster.bootstrap_port), timeout=TIMEOUT * 3) as stranger:
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    compare(cluster, cluster.proxy, "/v1/completions", completion(11))


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_server_fails_its_requests_only_and_comes_back(cluster: Cluster, role: str) -> None:
    """Case H03: an error at once, the other side's pages are free, and the pair serves again."""
    killed_and_back(cluster, role)


def killed_and_back(cluster: Cluster, role: str) -> None:
    """Kill a server's ranks under requests, start it again, and ask."""
    body = completion(70, max_tokens=100, ignore_eos=True)
    asked = [
        in_background(lambda: httpx.post(f"{cluster.proxy}/v1/completions", json=body, timeout=60))
        for _ in range(3)
    ]
    other = "decode" if role == "prefill" else "prefill"
    wait_until(lambda: used_pages(cluster.servers["decode"]) > 0, "a request runs", 20)
    for rank in cluster.servers[role].process.ranks():
        rank.kill()
    for thread, results in asked:
        thread.join(60)
        assert not thread.is_alive()
        (answer,) = results
        assert answer.status_code in (200, 502, 503)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: used_pages(cluster.servers[other]) == 0, "pages come back", TIMEOUT * 3 + 5)
    cluster.servers[role].process.end()
    cluster.start(role)
    cluster.wait_routed()
    compare(cluster, cluster.proxy, "/v1/completions", completion(33))
    cluster.wait_free()


def test_a_client_that_goes_away_frees_both_sides(cluster: Cluster) -> None:
    """Case H06 over HTTP."""
    for words in (2, 70):
        body = completion(words, max_tokens=150, ignore_eos=True) | {"stream": True}
        with httpx.stream("POST", f"{cluster.proxy}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
        cluster.wait_free()
    compare(cluster, cluster.proxy, "/v1/completions", completion(21))


# ---- the third-party router


@pytest.fixture(scope="module")
def sglang_router(cluster: Cluster) -> Iterator[str]:
    if importlib.util.find_spec("sglang_router") is None:
        pytest.skip("sglang-router is not installed (pip install sglang-router)")
    (port,) = free_ports("127.0.0.1", 1)
    arguments = [
        *("-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin"),
        *("--prefill", cluster.servers["prefill"].url, str(cluster.bootstrap_port)),
        *("--decode", cluster.servers["decode"].url, "--host", "127.0.0.1", "--port", str(port)),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    ]
    env = environment()
    env["PYTHONPATH"] = ":".join([env["PYTHONPATH"], *sys.path])
    process = Process(arguments, env=env)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url), "the router serves", 60)
        yield url
    finally:
        process.end()


def answers(url: str) -> bool:
    try:
        answer = httpx.post(f"{url}/v1/completions", json=completion(2), timeout=10)
        return answer.status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_the_same_answer_through_sglang_router(
    cluster: Cluster, sglang_router: str, path: str, body: dict[str, Any]
) -> None:
    compare(cluster, sglang_router, path, body)


@pytest.mark.parametrize("index", [0, 3, 8])
def test_the_same_stream_through_sglang_router(cluster: Cluster, sglang_router: str, index: int) -> None:
    path, body = REQUESTS[index]
    assert streamed(sglang_router + path, body) == streamed(cluster.plain.url + path, body)
