"""What a user does: start the command, talk to it with the OpenAI client, look at it, end it."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import Answers
from tests.e2e.processes import (
    BASE,
    READY,
    SERVE,
    Served,
    answers,
    assert_same_answers,
    environment,
    running,
    serving,
    wait_until,
)

GREEDY = {"model": "tiny-random", "temperature": 0}
IGNORE_EOS = {"extra_body": {"ignore_eos": True}}
USAGE = ("interlock:kv_cache_usage_perc", "interlock:kv_window_cache_usage_perc")


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def interlock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "interlock", *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )


def test_the_openai_client_chats_streams_and_completes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-random"]
    messages = [{"role": "user", "content": "Say something"}]
    whole = client.chat.completions.create(messages=messages, max_tokens=12, **GREEDY, **IGNORE_EOS)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    parts = client.chat.completions.create(
        messages=messages, max_tokens=12, stream=True, **GREEDY, **IGNORE_EOS
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert text


def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI) -> None:
    done = client.completions.create(
        prompt=[9, 8, 7, 6], max_tokens=3, logprobs=2, echo=True, **GREEDY, **IGNORE_EOS
    )
    scores = done.choices[0].logprobs
    assert scores is not None
    assert len(scores.tokens) == 7
    assert scores.token_logprobs[0] is None
    assert all(score < 0 for score in scores.token_logprobs[1:])
    for token, score, top in list(
        zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True)
    )[4:]:
        assert top[token] == score == max(top.values())


def test_bad_requests_are_told_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(prompt="x", model="tiny-random", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(prompt="x", model="gpt-9")


def test_plan_shows_both_sides_of_a_running_server(server: Served) -> None:
    shown = interlock("plan", "--receipts", server.url)
    assert shown.returncode == 0, shown.stderr
    assert "moe_a2a_backend" in shown.stdout
    asked = interlock("plan", "tiny-random", "--page-size", "8", "--receipts", server.url)
    assert asked.returncode == 1
    assert "--page-size" in asked.stdout + asked.stderr


def test_generate_answers_without_a_server(client: openai.OpenAI) -> None:
    served = client.completions.create(prompt="Once upon a time", max_tokens=8, **GREEDY)
    done = interlock("generate", "tiny-random", "--prompt", "Once upon a time", "--max-tokens", "8", *BASE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == served.choices[0].text + "\n"


def test_a_client_that_goes_away_frees_its_pages(server: Served) -> None:
    body = {**GREEDY, "prompt": [5] * 40, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 48}
    before = server.metrics().get("interlock:requests_aborted_total", 0)
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # kept: the connection is closed when the iterator is collected
        next(lines)
        assert server.metrics()[USAGE[0]] > 0
    wait_until(lambda: all(server.metrics()[name] == 0 for name in USAGE), "all pages are free or cached")
    metrics = server.metrics()
    assert metrics["interlock:requests_live"] == 0
    assert metrics["interlock:requests_aborted_total"] > before


def test_a_signal_lets_running_requests_finish() -> None:
    with serving() as served:
        body = {**GREEDY, "prompt": [5] * 8, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.signal(signal.SIGTERM)
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        finished = [json.loads(line[6:])["choices"] for line in rest[:-1]]
        assert any(choices and choices[0]["finish_reason"] == "length" for choices in finished)
        assert served.process.wait() == 0, served.process.text


def test_interrupting_by_keyboard_is_an_orderly_end() -> None:
    with serving() as served:
        served.process.signal(signal.SIGINT)
        assert served.process.wait() == 0, served.process.text
        assert "Traceback" not in served.process.text


def test_a_signal_during_the_start_ends_it() -> None:
    with running([*SERVE, *BASE, "--port", "0", "--tp-size", "2"]) as process:
        process.wait_for("ranks: tp 2")
        wait_until(lambda: len(process.ranks()) == 2, "ranks run")
        process.signal(signal.SIGTERM)
        assert process.wait(30) == 143, process.text
        assert "Traceback" not in process.text


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_server_with_its_error(victim: int) -> None:
    flags = ("--tp-size", "2", "--moe-a2a-backend", "shared_memory", "--stall-timeout", "5", "--port", "0")
    with running([*SERVE, *BASE, *flags]) as process:
        served = Served(process, process.wait_for(READY)[1])
        assert served.get("/health").status_code == 200
        process.ranks()[victim].kill()

        def is_unhealthy() -> bool:
            try:
                return served.get("/health").status_code == 503
            except httpx.TransportError:
                return True

        wait_until(is_unhealthy, "/health says 503 or nobody answers", 10)
        assert process.wait(20) == 1, process.text
        errors = [line for line in process.lines if line.startswith("interlock: ")]
        assert errors == [f"interlock: rank {victim} was killed by SIGKILL"]
        assert "Traceback" not in process.text


def test_two_ranks_and_a_port_that_is_taken(server: Served, one_process: Answers) -> None:
    got = answers(lambda body: server.post("/v1/completions", body).raise_for_status().json())
    assert_same_answers(got, one_process)
    port = re.search(r":(\d+)$", server.url)
    assert port is not None
    with running([*SERVE, *BASE, "--port", port[1]]) as second:
        assert second.wait() == 1
        assert f"cannot listen on 127.0.0.1:{port[1]}" in second.text
        assert "Traceback" not in second.text


def test_many_clients_at_once_get_the_answers_of_one(server: Served) -> None:
    def ask(index: int) -> str:
        body = {**GREEDY, "prompt": [10 + index % 3] * (5 + index % 3), "max_tokens": 12, "ignore_eos": True}
        text: str = server.post("/v1/completions", body).raise_for_status().json()["choices"][0]["text"]
        return text

    alone = [ask(index) for index in range(3)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(24)))
    assert together == [alone[index % 3] for index in range(24)]


@pytest.mark.parametrize("backend", ["collective", "shared_memory"])
def test_one_machine_opens_no_port_to_others(backend: str) -> None:
    """The ranks' store, their collectives and their messages stay on this machine; only HTTP may leave it."""
    flags = ("--tp-size", "2", "--moe-a2a-backend", backend, "--host", "127.0.0.3")
    with serving(*flags) as served:
        family = [psutil.Process(served.process.popen.pid), *served.process.ranks()]
        hosts = {
            connection.laddr.ip
            for process in family
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert hosts == {"127.0.0.1", "127.0.0.3"}
