"""A running server is drained, interrupted, and says where it hangs."""

from __future__ import annotations

import json
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import BASE, READY, ROOT, SERVE, Served, environment, running, serving, wait_until

LONG = {
    "model": "tiny-random",
    "prompt": [5] * 8,
    "max_tokens": 240,
    "ignore_eos": True,
    "stream": True,
    "n": 8,
}
HANG = """
import os, sys, threading, time

def hang():
    import ctypes
    while not os.path.exists(os.environ["HANG_FILE"]):
        time.sleep(0.05)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

if "interlock.engine.worker" in sys.orig_argv:
    threading.Thread(target=hang, daemon=True).start()
"""


def test_draining_refuses_new_requests_and_finishes_running_ones() -> None:
    """J04, with the probes apart and every response accounted for."""
    with serving("--drain-timeout", "60") as served:
        url = served.url + "/v1/completions"
        with httpx.stream("POST", url, json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.signal(signal.SIGTERM)
            wait_until(lambda: served.get("/ready").status_code == 503, "the server is not ready")
            assert served.get("/ready").json() == {"status": "draining", "in_flight": 1}
            assert served.get("/health").status_code == 200
            refused = served.post("/v1/completions", {**LONG, "stream": False})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        ends = [choice for line in rest[:-1] for choice in json.loads(line[6:])["choices"]]
        assert [choice["finish_reason"] for choice in ends if choice["finish_reason"]] == ["length"] * 8
        assert served.process.wait() == 0, served.process.text
        assert "Traceback" not in served.process.text


def test_a_second_signal_ends_at_once() -> None:
    with serving("--drain-timeout", "3600") as served:
        with httpx.stream("POST", served.url + "/v1/completions", json=LONG, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.signal(signal.SIGTERM)
            served.process.wait_for("new requests are refused")
            served.process.signal(signal.SIGTERM)
            with suppress(httpx.RemoteProtocolError):
                assert "[DONE]" not in "".join(lines)
        assert served.process.wait() == 128 + signal.SIGTERM, served.process.text


def test_a_rank_that_hangs_says_where_before_the_server_ends(tmp_path: Path) -> None:
    """J01: the whole process of the rank is stuck in a C call that holds the GIL."""
    (tmp_path / "sitecustomize.py").write_text(HANG)
    trigger = tmp_path / "now"
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}:{ROOT}", HANG_FILE=str(trigger))
    with running(
        [*SERVE, *BASE, "--port", "0", "--stall-timeout", "2", "--log-format", "json"], env=env
    ) as process:
        served = Served(process, process.wait_for(READY)[1])
        assert served.get("/health").status_code == 200
        trigger.touch()
        assert process.wait(60) == 1, process.text
        (error,) = [json.loads(line) for line in process.lines if '"error"' in line and "silent" in line]
    first, *rest = error["message"].splitlines()
    assert first.startswith("rank 0 has been silent for")
    told = "\n".join(rest)
    assert "where rank 0 was:" in told
    assert " in hang" in told
    assert "rank_loop.py" in told


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp-size", "2", "--moe-a2a-backend", "shared_memory"),
        pytest.param(("--tp-size", "2", "--attn-dp-size", "2"), marks=pytest.mark.slow),
        pytest.param(("--tp-size", "2", "--ep-size", "1"), marks=pytest.mark.slow),
        pytest.param(
            ("--tp-size", "2", "--attn-dp-size", "2", "--moe-a2a-backend", "collective"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_every_token_is_counted_at_its_experts(flags: tuple[str, ...]) -> None:
    """Rows that arrive = tokens that are dispatched x experts of a token x layers, over all ranks.

    In the replicated layout all ranks of a replica hold the same tokens, and each says so.
    """
    with serving(*flags) as served:
        body = {"model": "tiny-random", "prompt": [7] * 40, "max_tokens": 100, "n": 6, "ignore_eos": True}
        assert served.post("/v1/completions", body).status_code == 200
        plan = served.get("/plan").json()["plan"]
        card, attn_tp = plan["card"], plan["tp_size"] // plan["attn_dp_size"]
        layers = sum(layer["is_moe"] for layer in card["layers"])

        def counted() -> bool:
            ranks = served.get("/experts").json()["ranks"]
            return len(ranks) == 2 and all(rank["decode"]["steps"] >= 8 for rank in ranks)

        wait_until(counted, "both ranks have reported the decode steps")
        seen = served.get("/experts").json()
        whole = [rank for rank in seen["ranks"] if not rank["is_slice"]]
        assert len(seen["layers"]) == layers
        assert sum(map(sum, seen["rows"])) == sum(sum(rank["rows"]) for rank in whole)
        for phase in ("prefill", "decode"):
            copies = attn_tp if plan[f"moe_layout_{phase}"] == "replicated" else 1
            rows = sum(rank[phase]["rows"] for rank in whole)
            tokens = sum(rank[phase]["tokens"] for rank in seen["ranks"])
            assert rows * copies == tokens * card["experts"]["top_k"] * layers, phase
            assert rows > 0
        for rank in seen["ranks"]:
            assert 0 < rank["decode"]["capacity_use"] <= 1
            assert rank["decode"]["dispatch_ms"] > 0
            assert rank["decode"]["combine_ms"] > 0
