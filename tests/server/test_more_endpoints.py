"""What the API says about things it does not do, ranking of answers, time limits, CORS and priorities."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from interlock.server.token_names import TokenNames
from interlock.tokenizer import Tokenizer
from tests.server.conftest import Post, Serve
from tests.server.fake_engine import FakeEngine
from tests.server.sse import events


@pytest.mark.parametrize("body", [{}, {"model": "tiny", "input": "x"}, None])
def test_embeddings_are_refused_with_the_reason(http: httpx.Client, body: Any) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_endpoint"
    assert "no embedding head" in answer.json()["error"]["message"]


def test_best_of_returns_the_likeliest(complete: Post, engine: FakeEngine) -> None:
    """G25: n answers of best_of, best mean logprob first, and usage counts every token that was made."""
    engine.play = None
    body = complete(best_of=6, n=2, seed=3, logprobs=0, max_tokens=20).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert len(engine.requests) == 6
    assert body["usage"]["completion_tokens"] == sum(engine.emitted.values())
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in body["choices"]]
    assert means == sorted(means, reverse=True)
    every = complete(n=6, seed=3, logprobs=0, max_tokens=20).json()["choices"]
    lengths = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in every]
    assert means == sorted(lengths, reverse=True)[:2]
    assert complete(best_of=6, n=2, seed=3).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"best_of": 1, "n": 2}, "less than n"), ({"best_of": 3, "stream": True}, "streams")],
)
def test_best_of_limits(complete: Post, fields: dict[str, Any], words: str) -> None:
    answer = complete(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "best_of")
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(either: Post, engine: FakeEngine, stream: bool) -> None:
    engine.script("z" * 100, delay=0.02, eos=False)
    answer = either(timeout=0.3, max_tokens=100, stream=stream)
    assert answer.status_code == 200
    last = events(answer)[-1]["choices"][0] if stream else answer.json()["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", "timeout")
    assert len(engine.aborted) == 1
    assert not engine.live


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_never_begins_is_504(either: Post, engine: FakeEngine, stream: bool) -> None:
    engine.script("z", hold=True)
    answer = either(timeout=0.2, stream=stream)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    assert "Retry-After" in answer.headers


def test_the_servers_limit_holds_for_all(serve: Serve) -> None:
    engine, http = serve(request_timeout=0.2)
    engine.script("z", hold=True)
    for fields in ({}, {"timeout": 60}):
        assert (
            http.post("/v1/completions", json={"model": "tiny", "prompt": "x", **fields}).status_code == 504
        )


@pytest.mark.parametrize("timeout", [0, -1, "5", 1e9])
def test_timeouts_out_of_range(either: Post, timeout: Any) -> None:
    """G18."""
    answer = either(timeout=timeout)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


def test_no_cors_unless_asked(http: httpx.Client, serve: Serve) -> None:
    origin = {"Origin": "https://chat.example.org"}
    ask = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers
    assert http.options("/v1/models", headers=ask).status_code == 405
    _, open_http = serve(cors_origins=("https://chat.example.org",), api_key="k")
    answer = open_http.options("/v1/chat/completions", headers=ask)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert "access-control-allow-credentials" not in answer.headers
    refused = open_http.get("/v1/models", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin["Origin"])
    other = open_http.options("/v1/models", headers={**ask, "Origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in other.headers


def test_priorities_reach_the_scheduler(either: Post, engine: FakeEngine) -> None:
    engine.script("x")
    for priority in (-5, 7):
        assert either(priority=priority).status_code == 200
        assert engine.requests[-1].priority == priority


def test_special_tokens_are_named_in_logprobs(tokenizer: Tokenizer) -> None:
    assert TokenNames(tokenizer).text(2) == "<|im_end|>"


def test_the_queue_limit_holds_in_a_burst(serve: Serve) -> None:
    """F24: what was submitted since the schedulers last reported counts as waiting too."""
    engine, http = serve(max_waiting=4)
    engine.script("z", hold=True)
    body = {"model": "tiny", "prompt": "x", "n": engine.plan.max_running_requests + 4}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(http.post, "/v1/completions", json=body)
        while len(engine.live) < body["n"]:
            time.sleep(0.005)
        refused = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert refused.status_code == 429
        assert refused.headers["Retry-After"]
        assert refused.json()["error"]["code"] == "queue_full"
        engine.released = True
        assert first.result().status_code == 200
