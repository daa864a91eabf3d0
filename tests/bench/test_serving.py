"""Load on a server with known delays, on a clock that only the delays move: figures are the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interlock.bench.record import serve_evidence
from interlock.bench.serving.arrivals import Arrivals, arrivals_of
from interlock.bench.serving.exchange import Exchange
from interlock.bench.serving.figures import Limits, figures_of
from interlock.bench.serving.run import ServeResult, ServeSpec, make_client, read_prompts, run_serve
from interlock.errors import InterlockError, Refusal
from tests.bench.stub_server import Answer, StubServer, chunk, plain, usage
from tests.bench.test_decode import FACTS
from tests.bench.virtual_loop import VirtualLoop, run_virtually

WARM_UPS = 4
"""Two that find the length of prompts, two of the shape of the run."""


def spec(**changes: Any) -> ServeSpec:
    values: dict[str, Any] = {
        "base_url": "http://stub/v1",
        "arrivals": Arrivals("fixed", rate=2.0),
        "requests": 20,
        "input_tokens": 8,
        "output_tokens": 5,
        "seed": 7,
        "endpoint": "chat",
    }
    return ServeSpec(**values | changes)


def load(server: StubServer, **changes: Any) -> ServeResult:
    asked = spec(**changes)

    async def run() -> ServeResult:
        async with make_client(asked.base_url, None, 8, transport=server) as client:
            return await run_serve(client, asked)

    return run_virtually(run())


@pytest.mark.parametrize("arrivals", [Arrivals("fixed", rate=2.0), Arrivals("poisson", rate=2.0)])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_figures_are_the_known_delays(arrivals: Arrivals, endpoint: str) -> None:
    """Within 2 % of truth (here: to a microsecond), for either endpoint and way to arrive."""

    def play(number: int, body: dict[str, Any]) -> Answer:
        answer = plain(0.200, 0.030, 5)
        if endpoint == "chat":
            assert body["messages"][0]["role"] == "user"
            return answer
        texts = [{"choices": [{"index": 0, "text": "x", "finish_reason": None}]}] * 5
        delays = [0.200, *[0.030] * 4]
        end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        return Answer([*zip(delays, texts, strict=True), (0.0, end), (0.0, usage(8, 5, 0)), (0.0, "[DONE]")])

    figures = load(StubServer(play), arrivals=arrivals, endpoint=endpoint, requests=40).figures
    assert (figures.completed, figures.failed, figures.incomplete) == (40, 0, 0)
    for share in ("p50", "p90", "p99"):
        assert figures.times["ttft"][share] == pytest.approx(0.200, abs=1e-6)
        assert figures.times["tpot"][share] == pytest.approx(0.030, abs=1e-6)
        assert figures.times["itl"][share] == pytest.approx(0.030, abs=1e-6)
        assert figures.times["latency"][share] == pytest.approx(0.320, abs=1e-6)
    assert figures.mean_output_tokens == 5
    assert figures.lateness_most == pytest.approx(0, abs=1e-6)


def test_a_slow_server_does_not_slow_the_load_down() -> None:
    """No coordinated omission: requests come twice as fast as a single lane serves them, so the i-th waits
    i / 2 s longer; a client that waits for answers would report one second for all."""
    figures = load(StubServer(lambda n, b: plain(0.8, 0.05, 5), lanes=1), requests=21).figures
    assert figures.times["latency"]["p50"] == pytest.approx(1.0 + 10 * 0.5, rel=0.02)
    assert figures.times["latency"]["p99"] == pytest.approx(1.0 + 19.8 * 0.5, rel=0.02)
    assert figures.times["ttft"]["p50"] == pytest.approx(0.8 + 10 * 0.5, rel=0.02)
    assert figures.wall == pytest.approx(21.0, rel=0.02)


def test_lateness_of_the_client_is_counted() -> None:
    """The client itself stands still for 3 s while it sends the first request: those due meanwhile are sent
    late, and their latencies count from when they were due."""

    def stand_still(number: int) -> None:
        if number == WARM_UPS:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.busy(3.0)

    server = StubServer(lambda n, b: plain(0.1, 0.025, 5), on_request=stand_still)
    result = load(server, requests=10)
    figures = result.figures
    late = [max(0.0, 3.0 - 0.5 * index) for index in range(10)]
    assert [round(each.lateness, 6) for each in result.exchanges[1:]] == late[1:]
    assert figures.lateness_most == pytest.approx(2.5)
    expected = [3.2, *(lateness + 0.2 for lateness in late[1:])]
    assert [each.latency for each in result.exchanges] == pytest.approx(expected)
    assert [each.ttft for each in result.exchanges] == pytest.approx([value - 0.1 for value in expected])
    assert any("late" in warning for warning in result.warnings)


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    """Ten requests of one second, four at once: three waves."""
    figures = load(
        StubServer(lambda n, b: plain(0.8, 0.05, 5)), arrivals=Arrivals("closed", concurrency=4), requests=10
    ).figures
    assert figures.wall == pytest.approx(3.0)
    assert figures.times["latency"]["p99"] == pytest.approx(1.0)
    assert figures.rates["output_tokens_per_second"] == pytest.approx(50 / 3)


def test_first_token_is_the_first_content_or_reasoning() -> None:
    """K03: role at 10 ms, reasoning at 50, content at 90 and 110, usage at 120."""
    recorded = Answer(
        [
            (0.010, chunk(role=True)),
            (0.040, chunk(reasoning="hm")),
            (0.040, chunk("a")),
            (0.020, chunk("b", finish="stop")),
            (0.010, usage(8, 3)),
            (0.0, "[DONE]"),
        ]
    )
    result = load(StubServer(lambda n, b: recorded), requests=1)
    (exchange,) = result.exchanges
    assert exchange.ttft == pytest.approx(0.050)
    assert exchange.gaps == pytest.approx([0.040, 0.020])
    assert exchange.tpot == pytest.approx((0.110 - 0.050) / (3 - 1))
    assert result.figures.short == 1
    assert result.figures.hit_rate is None


def test_nothing_received_is_none() -> None:
    """K03: no content at all gives no time to first token, and no percentile of it."""
    empty = Answer(
        [(0.01, chunk(role=True)), (0.01, chunk(finish="stop")), (0.0, usage(8, 0)), (0.0, "[DONE]")]
    )
    result = load(StubServer(lambda n, b: empty), requests=3)
    assert result.exchanges[0].ttft is None
    assert result.figures.times["ttft"]["p50"] is None
    assert result.figures.completed == 3
    assert result.figures.mean_output_tokens == 0


def test_failed_and_incomplete_requests_are_counted_apart() -> None:
    """K04: one in ten never ends, one in twenty gets a 500: 85 / 5 / 10, no result, percentiles named."""

    def play(number: int, body: dict[str, Any]) -> Answer:
        if (number - WARM_UPS) % 10 == 3 and number >= WARM_UPS:
            return Answer([(0.1, chunk("a"))], hangs=True)
        if (number - WARM_UPS) % 20 == 7 and number >= WARM_UPS:
            return Answer([], status=500)
        return plain(0.1, 0.025, 5)

    result = load(StubServer(play), requests=100, arrivals=Arrivals("fixed", rate=50), request_timeout=30.0)
    figures = result.figures
    assert (figures.completed, figures.failed, figures.incomplete) == (85, 5, 10)
    assert figures.failure_rate == pytest.approx(0.15)
    evidence = serve_evidence(result, FACTS, "server", max_failures=0.01)
    assert evidence.verdict == "invalid"
    timed = [m for m in evidence.measurements if "percentile" in m.conditions]
    assert timed
    assert all(m.name.endswith("_completed_only") for m in timed)
    assert serve_evidence(result, FACTS, "server", max_failures=0.2).verdict == "measured"
    assert any("5 x 500" in note for note in evidence.notes)


def test_the_end_of_the_run_drops_nobody() -> None:
    """K04: what still runs when the time is over is counted as incomplete, the slow ones above all."""

    def play(number: int, body: dict[str, Any]) -> Answer:
        return plain(0.1 if number % 2 else 5.0, 0.025, 5)

    arrivals = Arrivals("closed", concurrency=2)
    figures = load(StubServer(play), arrivals=arrivals, requests=1000, duration=4.0).figures
    assert figures.incomplete >= 1
    assert figures.offered == figures.completed + figures.incomplete
    assert figures.wall == pytest.approx(4.0)


def test_a_stream_without_an_end_is_incomplete() -> None:
    cut = Answer([(0.1, chunk("a")), (0.1, chunk("b"))])
    result = load(StubServer(lambda n, b: cut if n >= WARM_UPS else plain(0.1, 0.1, 5)), requests=2)
    assert [each.status for each in result.exchanges] == ["incomplete"] * 2
    assert result.exchanges[0].error == "the stream ended without a finish reason"


def test_warm_up_is_outside_the_figures() -> None:
    """K05: two seconds at the first request of each prompt length change no percentile."""
    seen: set[int] = set()

    def play(number: int, body: dict[str, Any]) -> Answer:
        words = len(body["messages"][0]["content"].split())
        extra = 0.0 if words in seen else 2.0
        seen.add(words)
        return plain(0.1 + extra, 0.025, 5, prompt=3 * words + 5)

    result = load(StubServer(play), input_tokens=65)
    assert result.figures.times["latency"]["p99"] == pytest.approx(0.2)
    assert result.figures.mean_prompt_tokens == pytest.approx(65)


def cached_server() -> Callable[[int, dict[str, Any]], Answer]:
    """A server with a prefix cache, word for word."""
    known: set[tuple[str, ...]] = set()

    def play(number: int, body: dict[str, Any]) -> Answer:
        words = tuple(body["messages"][0]["content"].split())
        hit = max((n for n in range(len(words) + 1) if words[:n] in known), default=0)
        known.update(words[:n] for n in range(1, len(words) + 1))
        return plain(0.1, 0.025, 5, prompt=len(words), cached=hit)

    return play


def test_prompts_do_not_hit_the_prefix_cache_by_chance() -> None:
    """K01: two runs with fresh seeds hit nothing; the same seed twice hits all and says so."""
    server = StubServer(cached_server())
    for seed in (101, 102):
        assert load(server, seed=seed).figures.hit_rate == pytest.approx(0, abs=0.01)
    first = load(server, seed=1, seed_given=True)
    again = load(server, seed=1, seed_given=True)
    assert first.figures.hit_rate == pytest.approx(0, abs=0.01)
    assert first.warnings == ()
    assert again.figures.hit_rate is not None
    assert again.figures.hit_rate > 0.9
    assert any("--seed repeats the prompts" in warning for warning in again.warnings)


def test_rates_have_one_meaning_each() -> None:
    """K06: four requests with known times and cached tokens, the rates worked out by hand."""

    def exchange(index: int, due: float, ended: float, prompt: int, cached: int, tokens: int) -> Exchange:
        chunks = [due + 1.0 + step for step in range(tokens)]
        return Exchange(
            index=index, asked_tokens=tokens, due=due, sent=due, chunks=chunks, ended=ended,
            status="completed", finish_reason="length", usage_tokens=tokens, prompt_tokens=prompt,
            cached_tokens=cached,
        )  # fmt: skip

    log = [
        exchange(0, 10.0, 14.0, 100, 0, 3),
        exchange(1, 11.0, 16.0, 100, 80, 4),
        exchange(2, 12.0, 20.0, 200, 0, 7),
        exchange(3, 13.0, 15.0, 50, 50, 2),
    ]
    figures = figures_of(log, Limits(latency=4.5))
    assert figures.wall == 10.0
    assert figures.rates == {
        "requests_completed_per_second": pytest.approx(0.4),
        "goodput_requests_per_second": pytest.approx(0.2),
        "input_tokens_submitted_per_second": pytest.approx(45.0),
        "input_tokens_computed_per_second": pytest.approx(32.0),
        "output_tokens_per_second": pytest.approx(1.6),
    }
    assert figures.hit_rate == pytest.approx(130 / 450)
    assert "throughput" not in figures.rates


@pytest.mark.parametrize(
    ("limits", "good"), [(Limits(ttft=0.15), 10), (Limits(tpot=0.01), 0), (Limits(), None)]
)
def test_goodput_counts_what_met_every_limit(limits: Limits, good: int | None) -> None:
    def play(number: int, body: dict[str, Any]) -> Answer:
        return plain(0.1 if number % 2 else 0.3, 0.025, 5)

    assert load(StubServer(play), limits=limits).figures.good == good


def test_a_label_must_be_what_the_server_does() -> None:
    """A08: a run labelled ep_size=4 against a server with ep_size 1 names both; without a label the server's
    plan is recorded."""
    server = StubServer(lambda n, b: plain(0.1, 0.025, 5), plan={"ep_size": 1, "prefix_cache": True})
    with pytest.raises(InterlockError, match="ep_size=4: the server runs ep_size=1"):
        load(server, expect={"ep_size": "4"})
    assert server.bodies == []
    result = load(server, expect={"ep_size": "1", "prefix_cache": "true"})
    evidence = serve_evidence(result, FACTS, "server", max_failures=0.01)
    assert evidence.arms[0].plan == {"ep_size": 1, "prefix_cache": True}
    with pytest.raises(InterlockError, match="shows no plan"):
        load(StubServer(lambda n, b: plain(0.1, 0.025, 5)), expect={"ep_size": "4"})


@pytest.mark.parametrize(
    "strange", ["{not json", "[1]", '{"choices": [3]}', '{"error": {"message": "full"}}']
)
def test_strange_answers_are_failures_not_crashes(strange: str) -> None:
    def play(number: int, body: dict[str, Any]) -> Answer:
        return Answer([(0.1, strange)]) if number >= WARM_UPS else plain(0.1, 0.025, 5)

    result = load(StubServer(play), requests=2)
    assert result.figures.failed == 2
    assert result.exchanges[0].error


def test_a_server_that_refuses_the_warm_up_is_not_measured() -> None:
    with pytest.raises(InterlockError, match=r"refused the warm-up request: 400.*--no-ignore-eos"):
        load(StubServer(lambda n, b: Answer([], status=400)))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('one prompt\n\n{"prompt": "another", "id": 3}\n')
    prompts = read_prompts(str(file))
    assert prompts == ("one prompt", "another")
    server = StubServer(lambda n, b: plain(0.1, 0.025, 5))
    load(server, prompts=prompts, requests=3)
    sent = [body["messages"][0]["content"] for body in server.bodies[WARM_UPS:]]
    assert sent == ["one prompt", "another", "one prompt"]
    file.write_text('{"text": 1}\n')
    with pytest.raises(Refusal, match="line 1"):
        read_prompts(str(file))


@pytest.mark.parametrize(
    ("kind", "rate", "concurrency"),
    [
        ("poisson", None, None),
        ("poisson", 1.0, 4),
        ("poisson", 0.0, None),
        ("fixed", None, 0),
        ("bursts", 1.0, None),
    ],
)
def test_loads_that_mean_nothing_are_refused(kind: str, rate: float | None, concurrency: int | None) -> None:
    with pytest.raises(Refusal):
        arrivals_of(kind, rate, concurrency)


def test_poisson_arrivals_have_the_rate() -> None:
    times = Arrivals("poisson", rate=5.0).times(4000, seed=3)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(5.0, rel=0.05)
    assert times == Arrivals("poisson", rate=5.0).times(4000, seed=3)
