"""Draining: new work is refused, running work finishes, and probes tell the difference."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from interlock.server.app import create_app
from interlock.server.errors import ApiError
from interlock.server.gate import Gate
from interlock.server.settings import ServerSettings
from interlock.tokenizer import Tokenizer
from tests.server.conftest import Serve
from tests.server.fake_engine import FakeEngine, Play
from tests.server.live import live_server
from tests.server.test_disconnect import wait_for
from tests.server.test_requests import error_of

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 8}


def test_gate_counts_and_closes() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.wait_idle(0.01)
        gate.enter()
        gate.enter()
        assert not await gate.wait_idle(0.01)
        gate.close(7)
        with pytest.raises(ApiError) as refused:
            gate.enter()
        assert refused.value.status == 503
        assert refused.value.headers["Retry-After"] == "7"
        gate.leave()
        waiting = asyncio.create_task(gate.wait_idle(10))
        await asyncio.sleep(0)
        gate.leave()
        assert await waiting
        assert gate.in_flight == 0

    asyncio.run(main())


def test_health_and_ready_apart(serve: Serve) -> None:
    """J01: alive is not the same as taking requests."""
    engine, http = serve()
    assert http.get("/ready").json() == {"status": "ready"}
    engine.reason = "rank 1 was killed by SIGKILL"
    assert http.get("/health").status_code == 503
    assert http.get("/ready").json() == {"status": "unhealthy", "reason": engine.reason}


def test_a_closed_gate_refuses_new_requests_and_lets_running_ones_finish(tokenizer: Tokenizer) -> None:
    """J04: 503 with Retry-After for new work, the whole answer for what runs, /health still 200."""
    engine = FakeEngine()
    engine.script("abc", hold=True)
    app = create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)))
    gate: Gate = app.state.context.gate
    answers: list[httpx.Response] = []
    with live_server(app) as url, httpx.Client(base_url=url, timeout=20) as http:
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(url + "/v1/completions", json=BODY, timeout=20))
        )
        thread.start()
        wait_for(lambda: bool(engine.live))
        gate.close(30)
        assert gate.in_flight == 1
        refused = http.post("/v1/completions", json=BODY)
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert http.get("/health").status_code == 200
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "draining", "in_flight": 1})
        assert (
            'interlock:requests_rejected_total{model_name="tiny",status="503"} 1.0'
            in http.get("/metrics").text
        )
        engine.released = True
        thread.join()
    assert answers[0].json()["choices"][0]["text"] == "abc"
    assert gate.in_flight == 0


def test_every_way_out_leaves_the_gate(tokenizer: Tokenizer) -> None:
    """Refusals, failures and unknown paths are counted down as answers are."""
    engine = FakeEngine(play=lambda request: Play(error_at=0))
    app = create_app(engine, tokenizer, ServerSettings(model_names=("tiny",), max_body_bytes=40))
    with live_server(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 413
        assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 500
        assert client.post("/v1/completions", json={"prmpt": "x"}).status_code == 400
        assert client.post("/nowhere").status_code == 404
        assert client.post("/v1/completions", content=b"{").status_code == 400
        gate: Gate = app.state.context.gate
        wait_for(lambda: gate.in_flight == 0)
