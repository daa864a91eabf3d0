"""Ids of requests, and what is written about them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from interlock.logs import JsonFormatter
from tests.server.conftest import Serve
from tests.server.fake_engine import FakeEngine, Play, byte_ids
from tests.server.test_disconnect import wait_for

SECRET_PROMPT = "my password is hunter2"


class Lines(logging.Handler):
    """What was logged, as the JSON form would show it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.text: list[str] = []

    def emit(self, made: logging.LogRecord) -> None:
        self.text.append(self.format(made))

    def of(self, logger: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.text) if line["logger"] == logger]

    def answered(self, count: int) -> list[dict[str, Any]]:
        """The lines of ``count`` answers, which may be written a moment after the client has them."""
        wait_for(lambda: len(self.of("interlock.access")) >= count)
        return self.of("interlock.access")


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("interlock")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def complete(http: httpx.Client, **changes: Any) -> httpx.Response:
    headers = changes.pop("headers", {})
    body = {"model": "tiny", "prompt": SECRET_PROMPT, "max_tokens": 4, **changes}
    return http.post("/v1/completions", json=body, headers=headers)


def test_the_clients_id_is_kept_and_found_in_every_line(
    http: httpx.Client, engine: FakeEngine, lines: Lines
) -> None:
    engine.script("ab")
    answer = complete(http, headers={"X-Request-Id": "trace/42"})
    assert answer.headers["x-request-id"] == "trace/42"
    (access,), (choice,) = lines.answered(1), lines.of("interlock.requests")
    assert choice["request_id"] == access["request_id"] == "trace/42"
    assert (choice["outcome"], choice["completion_tokens"]) == ("stop", 3)
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert access["message"] == "answered"


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", 'a"b'])
def test_an_id_is_made_where_none_is_fit(http: httpx.Client, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    made = http.get("/version", headers=headers).headers["x-request-id"]
    assert len(made) == 32
    assert made != http.get("/version", headers=headers).headers["x-request-id"]


def test_no_prompt_answer_or_key_is_written(serve: Serve, lines: Lines) -> None:
    """At level info, with a refusal, a failure and an answer; query strings are left out too."""
    engine, http = serve(api_key="s3cret-key")
    engine.script("the answer")
    key = {"Authorization": "Bearer s3cret-key"}
    assert complete(http, headers=key).status_code == 200
    assert complete(http, headers={"Authorization": "Bearer wrong-key"}).status_code == 401
    assert complete(http, headers=key, temperature=-1).status_code == 400
    engine.play = lambda request: Play(error_at=0)
    assert complete(http, headers=key).status_code == 500
    http.get("/v1/models?token=s3cret-key", headers=key)
    assert sorted(line["status"] for line in lines.answered(5)) == [200, 200, 400, 401, 500]
    written = "\n".join(lines.text)
    for secret in ("hunter2", "the answer", "s3cret", "wrong-key"):
        assert secret not in written


def test_probes_are_quiet(http: httpx.Client, lines: Lines) -> None:
    for path in ("/health", "/ready", "/metrics", "/load", "/experts", "/page/app.js"):
        assert http.get(path).status_code == 200
    assert lines.of("interlock.access") == []


def test_an_unforeseen_error_has_the_id_and_a_traceback_in_the_log(
    serve: Serve, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, http = serve()

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("interlock.server.info.version", broken)
    answer = http.get("/version", headers={"X-Request-Id": "bug-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "bug-1")
    assert answer.json()["error"]["code"] == "internal_error"
    assert "a bug" not in answer.text
    lines.answered(1)
    (error,) = lines.of("interlock.server")
    assert "RuntimeError: a bug" in error["exception"]
    assert error["request_id"] == "bug-1"


def test_a_client_that_left_is_told_apart(http: httpx.Client, engine: FakeEngine, lines: Lines) -> None:
    engine.play = lambda request: Play(tokens=byte_ids("abc" * 30), delay=0.02)
    body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 60}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    (access,) = lines.answered(1)
    assert access["message"] == "cut short"
    (choice,) = lines.of("interlock.requests")
    assert (choice["message"], choice["outcome"]) == ("ended", "abort")
