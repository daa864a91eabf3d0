"""Traces: spans with true times, the client's context as parent, a refusal where packages are missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.resolve import resolve
from interlock.server.app import create_app
from interlock.server.settings import ServerSettings
from interlock.server.tracing import NoTracer, OtelTracer, open_tracer, traces_url
from interlock.tokenizer import Tokenizer
from tests.plan.machines import machine, tiny_card
from tests.server.conftest import Serve
from tests.server.fake_engine import FakeEngine, Play, fake_plan
from tests.server.live import live_server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 8}


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_urls(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert isinstance(open_tracer(fake_plan()), NoTracer)


def test_refused_where_the_packages_are_missing() -> None:
    options = Options.of(model="m", otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(Refusal, match=r"opentelemetry-sdk and .*pip install 'interlock\[otel\]'"):
        resolve(options, tiny_card(), machine())
    with pytest.raises(Refusal, match="no http:// or https://"):
        resolve(Options.of(model="m", otlp_endpoint="127.0.0.1:4318"), tiny_card(), machine())


@pytest.fixture
def spans(tokenizer: Tokenizer) -> Iterator[tuple[FakeEngine, httpx.Client, Any]]:
    """An engine, a client and the exporter that gets every span at once."""
    reason = "opentelemetry-sdk is not installed"
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason=reason)
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=reason)
    exporter = memory.InMemorySpanExporter()
    engine = FakeEngine()
    tracer = OtelTracer(engine.plan, export.SimpleSpanProcessor(exporter))
    app = create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)), tracer=tracer)
    with live_server(app) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield engine, http, exporter
    tracer.close()


def test_a_request_is_a_span_with_its_phases(spans: tuple[FakeEngine, httpx.Client, Any]) -> None:
    engine, http, exporter = spans
    engine.script("abc", delay=0.005, cached=1)
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert set(found) == {"interlock.request", "queue", "prefill", "decode"}
    whole = found["interlock.request"]
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == "00f067aa0ba902b7"
    order = [whole.start_time]
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == whole.context.span_id
        order += [found[name].start_time, found[name].end_time]
    order.append(whole.end_time)
    assert order == sorted(order)
    assert found["decode"].end_time > found["decode"].start_time
    attributes = dict(whole.attributes)
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reason"] == "stop"
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(0.001)
    assert not any("abc" in str(value) for value in attributes.values())


def test_failed_requests_are_errors_without_a_decode(spans: tuple[FakeEngine, httpx.Client, Any]) -> None:
    engine, http, exporter = spans
    engine.play = lambda request: Play(error_at=0)
    assert http.post("/v1/completions", json=BODY).status_code == 500
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert "decode" not in found
    assert found["interlock.request"].status.status_code.name == "ERROR"


def test_a_client_that_does_not_want_to_be_sampled_is_not(
    spans: tuple[FakeEngine, httpx.Client, Any],
) -> None:
    engine, http, exporter = spans
    engine.script("abc")
    for parent in (f"00-{TRACE}-00f067aa0ba902b7-00", "nonsense", ""):
        assert http.post("/v1/completions", json=BODY, headers={"traceparent": parent}).status_code == 200
    assert len([span for span in exporter.get_finished_spans() if span.name == "interlock.request"]) == 2


def test_a_broken_exporter_reaches_no_request(serve: Serve, tokenizer: Tokenizer) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")

    class Broken:
        def on_start(self, *_: object, **__: object) -> None:
            raise OSError("no disk")

        def on_end(self, *_: object) -> None:
            raise OSError("no disk")

        def _on_ending(self, *_: object) -> None:
            return

        def force_flush(self, *_: object) -> bool:
            return True

        def shutdown(self) -> None:
            return

    engine = FakeEngine()
    engine.script("abc")
    tracer = OtelTracer(engine.plan, Broken())
    with live_server(
        create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)), tracer=tracer)
    ) as url:
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 200


def test_spans_arrive_at_a_collector() -> None:
    """Through the exporter that ``--otlp-endpoint`` opens, over HTTP."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter", reason="the OTLP exporter is not installed"
    )
    from interlock.server.choice_times import ChoiceTimes

    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        tracer = open_tracer(fake_plan(otlp_endpoint=f"http://127.0.0.1:{server.server_port}"))
        times = ChoiceTimes(
            request_id="cmpl-1-0",
            outcome="stop",
            prompt_tokens=3,
            cached_tokens=0,
            completion_tokens=2,
            arrival=1.0,
            submitted=1.0,
            admitted=1.1,
            first_token=1.2,
            last_token=1.3,
            ended=1.4,
        )
        tracer.record(times)
        tracer.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [path for path, _ in bodies] == ["/v1/traces"]
    assert b"cmpl-1-0" in bodies[0][1]
