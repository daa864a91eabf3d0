"""Health, metrics, plan, version, cache flush, queue limit and API key."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from interlock.engine.messages import AddRequest, SchedulerStats
from interlock.server.metric_aliases import ALIAS_NAMES, ALIASES
from interlock.server.metrics import METRIC_NAMES, Metrics
from tests.server.conftest import Serve
from tests.server.fake_engine import EOS, FakeEngine, Play, byte_ids, fake_plan
from tests.server.test_disconnect import open_and_close, wait_for
from tests.server.test_requests import error_of

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 20}


def samples(http: httpx.Client) -> dict[str, float]:
    """Sample name -> sum over labels."""
    text = http.get("/metrics").text
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def test_health_follows_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """J01: 200 while healthy, 503 with the reason when dead or stuck, 200 again."""
    assert http.get("/health").status_code == 200
    engine.reason = "rank 1 has made no step for 60 s"
    answer = http.get("/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, engine.reason)
    engine.reason = None
    assert http.get("/health").status_code == 200


def test_metrics_names_are_the_documented_ones(http: httpx.Client) -> None:
    """J09: the exposition parses, and has exactly the documented names."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert families == METRIC_NAMES | ALIAS_NAMES
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    ours, theirs = page.split("### Names of other engines")
    table = [line.split("|")[1] for line in ours.splitlines() if line.startswith("| `interlock:")]
    assert set(re.findall(r"interlock:\w+", "".join(table))) == METRIC_NAMES
    rows = [re.findall(r"`(\S+?)`", line) for line in theirs.splitlines() if line.startswith("| `interlock:")]
    assert {ours: tuple(aliases) for ours, *aliases in rows} == ALIASES


def test_metrics_identities(serve: Serve) -> None:
    """J09: started = finished + aborted + failed + live; refused ones are counted apart."""
    engine, http = serve()

    def play(request: AddRequest) -> Play:
        seed = request.sampling.seed
        if seed == 1:
            return Play(tokens=byte_ids("abc"), error_at=2)
        return Play(tokens=[*byte_ids("abc"), EOS], hold=seed == 2)

    engine.play = play
    for _ in range(6):
        assert http.post("/v1/completions", json={**BODY, "n": 2}).status_code == 200
    for stream in (False, True, True):
        body = {**BODY, "seed": 1, "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == (200 if stream else 500)
    engine.play = lambda request: Play(error_at=0)
    assert http.post("/v1/completions", json={**BODY, "stream": True}).status_code == 500
    engine.play = play
    for _ in range(4):
        assert http.post("/v1/completions", json={**BODY, "n": 0}).status_code == 400
    for _ in range(2):
        open_and_close(str(http.base_url), {**BODY, "seed": 2}, lambda: bool(engine.live), "/v1/completions")
        wait_for(lambda: not engine.live)
    found = samples(http)
    assert found["interlock:requests_started_total"] == 12 + 4 + 2
    assert found["interlock:request_success_total"] == 12
    assert found["interlock:requests_failed_total"] == 4
    assert found["interlock:requests_aborted_total"] == 2
    assert found["interlock:requests_live"] == 0
    assert found["interlock:requests_rejected_total"] == 2 + 4
    assert found["interlock:time_to_first_token_seconds_count"] == 12 + 3
    assert found["interlock:inter_token_latency_seconds_count"] == 12 * 3 + 3
    assert found["interlock:e2e_request_latency_seconds_count"] == 12
    assert found["interlock:request_generation_tokens_sum"] == 12 * 4
    assert found["interlock:request_queue_time_seconds_count"] == 12 + 3


def test_scheduler_counters_are_exposed(serve: Serve) -> None:
    stats = SchedulerStats(
        running=3,
        waiting=2,
        full_pages=10,
        full_pages_free=4,
        full_pages_cached=1,
        prompt_tokens_total=100,
        generated_tokens_total=50,
        prefix_queries_total=80,
        prefix_hits_total=40,
        retractions_total=7,
    )
    engine, http = serve()
    engine.extra_stats = stats
    found = samples(http)
    assert found["interlock:num_requests_running"] == 3
    assert found["interlock:num_requests_waiting"] == 2
    assert found["interlock:kv_cache_usage_perc"] == 0.5
    assert found["interlock:prompt_tokens_total"] == 100
    assert found["interlock:generation_tokens_total"] == 50
    assert found["interlock:prefix_cache_hits_total"] == 40
    assert found["interlock:num_preemptions_total"] == 7
    assert found["interlock:engine_healthy"] == 1


def test_faults_in_metrics_reach_no_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """J09: an exception inside the metrics is logged; requests and /metrics go on."""
    _, http = serve()

    def broken(*_: Any) -> None:
        raise ValueError("counters can only go up")

    monkeypatch.setattr("prometheus_client.Histogram.observe", broken)
    monkeypatch.setattr(FakeEngine, "stats", broken)
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert http.get("/metrics").status_code == 200


def test_metrics_are_per_server() -> None:
    """Two servers in one process have registries of their own."""
    first, second = Metrics(FakeEngine(), "a"), Metrics(FakeEngine(), "b")
    first.started(5)
    assert b'interlock:requests_started_total{model_name="b"} 0.0' in second.exposition()


def test_plan_shows_provenance_and_receipts_but_no_secret(serve: Serve) -> None:
    engine, http = serve(FakeEngine(plan=fake_plan(api_key_set=True)), api_key="s3cret")
    answer = http.get("/plan", headers={"Authorization": "Bearer s3cret"})
    body = answer.json()
    assert body["plan"]["served_model_name"] == "tiny"
    assert body["plan"]["provenance"] == {}
    assert body["plan"]["card"]["vocab_size"] == engine.plan.card.vocab_size
    assert body["receipts"] == {"0": {"tp_size": 1}}
    assert "s3cret" not in answer.text


def test_version_and_openapi(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    paths = http.get("/openapi.json").json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "model", "temperature"} <= schema["properties"].keys()


def test_flush_needs_an_idle_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """F23: 409 and no flush while a request runs, which is not disturbed; 200 when idle or after a wait."""
    engine.script("abc", hold=True)
    answers: list[httpx.Response] = []
    url = http.base_url

    def run() -> None:
        answers.append(httpx.post(str(url.join("/v1/completions")), json=BODY, timeout=20))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: bool(engine.live))
    assert error_of(http.post("/flush_cache"), 409)["code"] == "busy"
    assert engine.flushes == 0
    threading.Timer(0.05, lambda: setattr(engine, "released", True)).start()
    assert http.post("/flush_cache?wait=10").status_code == 200
    thread.join()
    assert engine.flushes == 1
    assert answers[0].json()["choices"][0]["text"] == "abc"
    assert http.post("/flush_cache").status_code == 200
    assert error_of(http.post("/flush_cache?wait=-1"))["param"] == "wait"
    assert error_of(http.post("/flush_cache?wait=nan"))["param"] == "wait"


def test_queue_limit(serve: Serve) -> None:
    """F24: beyond the limit 429 with the error object and Retry-After; later requests are served again."""
    engine, http = serve(max_waiting=4)
    engine.extra_stats = SchedulerStats(running=1, waiting=4)
    answer = http.post("/v1/completions", json=BODY)
    assert error_of(answer, 429)["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
    assert engine.requests == []
    engine.extra_stats = SchedulerStats(running=1, waiting=3)
    assert http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Basic kéy", 401),
        ("kéy", 401),
        ("Bearer kéy2", 401),
        ("Bearer kéy", 200),
        ("bearer kéy", 200),
    ],
)
def test_api_key(serve: Serve, header: str | None, status: int) -> None:
    """Everything but probes and scrapes needs the key; there is no CORS header either way."""
    engine, http = serve(api_key="kéy")
    headers = {} if header is None else {b"authorization": header.encode()}
    for method, path, json in [
        ("POST", "/v1/completions", BODY),
        ("GET", "/v1/models", None),
        ("GET", "/plan", None),
        ("POST", "/flush_cache", None),
    ]:
        answer = http.request(method, path, json=json, headers={**headers, b"origin": b"http://x"})
        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")]
        if status == 401:
            assert error_of(answer, 401)["code"] == "invalid_api_key"
    assert len(engine.requests) == (status == 200)
    for path in ("/health", "/metrics", "/version"):
        assert http.get(path).status_code == 200


def test_settings_hide_the_key() -> None:
    from interlock.errors import StartupError
    from interlock.server.settings import ServerSettings

    settings = ServerSettings.from_plan(fake_plan(), api_key="s3cret")
    assert "s3cret" not in repr(settings)
    assert settings.model_names == ("tiny",)
    with pytest.raises(StartupError, match="--api-key"):
        ServerSettings(model_names=("x",), api_key="")
