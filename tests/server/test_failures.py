"""Faults of the engine, before and in the middle of an answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from interlock.engine.messages import AddRequest
from tests.server.conftest import Post, Serve
from tests.server.fake_engine import FakeEngine, Play, byte_ids
from tests.server.sse import events, texts
from tests.server.test_disconnect import wait_for
from tests.server.test_requests import error_of


@pytest.mark.parametrize("n", [1, 3])
def test_fault_in_mid_stream(either: Post, engine: FakeEngine, n: int) -> None:
    """G21: one error event, then [DONE]; no finish reason is made up; the next request is answered."""

    def play(request: AddRequest) -> Play:
        return Play(
            tokens=byte_ids("abcdefgh" * 5), error_at=5 if request.request_id.endswith("-0") else None
        )

    engine.play = play
    chunks = events(either(stream=True, n=n, max_tokens=40))
    last = chunks.pop()
    assert last.keys() == {"error"}
    assert last["error"]["code"] == "engine_error"
    assert "scripted fault" in last["error"]["message"]
    assert texts(chunks) == "abcde"
    assert not any(c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == 0)
    assert len(engine.aborted) == n - 1
    engine.reset()
    assert either().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_fault_before_the_first_token_is_a_status(
    either: Post, engine: FakeEngine, stream: bool, n: int
) -> None:
    """G21: while no byte has been sent an error is an HTTP error, streamed or not."""
    engine.script("abc", error_at=0)
    assert error_of(either(stream=stream, n=n), 500)["code"] == "engine_error"


@pytest.mark.parametrize("stream", [False, True])
def test_aborted_by_the_engine(serve: Serve, stream: bool) -> None:
    """J09: a request that the engine drops ends with "abort" and counts as aborted, not finished."""
    engine, http = serve()
    engine.script("abc", hold=True)
    body = {"model": "tiny", "prompt": "Hi", "echo": True, "logprobs": 1, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/completions", json=body)
        wait_for(lambda: bool(engine.live))
        engine.aborted.extend(engine.live)
        response = answer.result()
    choices = [c for e in events(response) for c in e["choices"]] if stream else response.json()["choices"]
    assert choices[-1]["finish_reason"] == "abort"
    assert choices[0]["text"] == "Hi"
    assert choices[0]["logprobs"]["token_logprobs"] == [None, None]
    exposition = http.get("/metrics").text
    assert 'interlock:requests_aborted_total{model_name="tiny"} 1.0' in exposition
    assert "interlock:request_success_total{" not in exposition


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine(either: Post, engine: FakeEngine, stream: bool) -> None:
    """J01: 503 with the reason."""
    engine.reason = "rank 2 was killed"
    error = error_of(either(stream=stream), 503)
    assert error["code"] == "engine_dead"
    assert "rank 2 was killed" in error["message"]


def test_engine_dies_in_mid_answer(either: Post, engine: FakeEngine) -> None:
    """J02: running requests end with the reason."""
    engine.script("abcdef", dies_at=3)
    assert error_of(either(), 503)["code"] == "engine_dead"
    chunks = events(either(stream=True))
    assert chunks[-1]["error"]["code"] == "engine_dead"
    assert texts(chunks[:-1]) == "abc"


def test_only_the_faulty_request_fails(complete: Post, engine: FakeEngine) -> None:
    """G24: a request whose row cannot be sampled fails alone."""

    def play(request: AddRequest) -> Play:
        return Play(tokens=byte_ids("ok"), error_at=1 if request.sampling.seed == 13 else None)

    engine.play = play
    statuses = [complete(seed=seed, max_tokens=2).status_code for seed in (12, 13, 14)]
    assert statuses == [200, 500, 200]


def test_unforeseen_error_keeps_its_details_in_the_log(
    complete: Post, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def play(request: AddRequest) -> Play:
        raise KeyError("secret path")

    engine.play = play
    error = error_of(complete(), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "secret path" in caplog.text
