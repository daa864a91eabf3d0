"""Thousands of requests over HTTP, many of them given up by their client: no page and no request is lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Served, serving, wait_until

AT_ONCE = 48
MODES = [(), ("--tp-size", "2", "--attn-dp-size", "2", "--moe-a2a-backend", "shared_memory")]
SMALL = ("--threads", "1", "--kv-memory", "24MiB", "--dtype", "float32", "--max-model-len", "256")
USAGE = ("interlock:kv_cache_usage_perc", "interlock:kv_window_cache_usage_perc")


def draw(dice: random.Random) -> dict[str, Any]:
    """A request with a shared or a fresh prefix, of any length."""
    shared = [50 + dice.randrange(4)] * dice.choice((0, 20, 60))
    prompt = shared + [dice.randrange(8, 480) for _ in range(dice.randrange(1, 60))]
    return {
        "model": "tiny-random",
        "prompt": prompt,
        "max_tokens": dice.randrange(1, 60),
        "temperature": dice.choice((0, 1)),
        "n": dice.choice((1, 1, 1, 3)),
        "stream": dice.random() < 0.5,
        "ignore_eos": True,
    }


async def one(client: httpx.AsyncClient, dice: random.Random) -> str:
    """How it ended: "answered", "cut" (closed while streaming) or "gone" (cancelled while waiting)."""
    body = draw(dice)
    patience = dice.choice((None, None, 0.01, 0.1, 0.5))
    if not body["stream"]:
        try:
            answer = await asyncio.wait_for(client.post("/v1/completions", json=body), patience)
        except TimeoutError:
            return "gone"
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
        return "answered"
    lines_wanted = dice.choice((10_000, 1, 5))
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        last, count = "", 0
        lines = answer.aiter_lines()
        async for line in lines:
            last, count = line or last, count + 1
            if count >= lines_wanted:
                await lines.aclose()  # type: ignore[attr-defined]
                return "cut"
    assert last == "data: [DONE]"
    return "answered"


async def load(url: str, requests: int, seed: int) -> dict[str, int]:
    ends: dict[str, int] = {"answered": 0, "cut": 0, "gone": 0}
    todo = iter(range(requests))
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def work() -> None:
            for number in todo:
                ends[await one(client, random.Random(seed * 1_000_003 + number))] += 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return ends


def check_nothing_is_lost(served: Served) -> None:
    """free + cached + owned == total, with nothing owned, and every choice has ended in one way."""
    wait_until(lambda: served.metrics()["interlock:requests_live"] == 0, "no request is live")
    wait_until(lambda: all(served.metrics()[name] == 0 for name in USAGE), "no page is owned")
    seen = served.metrics()
    ended = sum(
        seen.get(f"interlock:{name}_total", 0)
        for name in ("request_success", "requests_aborted", "requests_failed")
    )
    assert seen["interlock:requests_started_total"] == ended
    assert seen.get("interlock:requests_failed_total", 0) == 0
    assert seen["interlock:num_requests_running"] == seen["interlock:num_requests_waiting"] == 0
    assert served.get("/health").status_code == 200


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize(
    "requests", [60, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_no_page_and_no_request_is_lost(mode: tuple[str, ...], requests: int) -> None:
    with serving(*mode, base=SMALL) as served:
        ends = asyncio.run(load(served.url, requests, seed=requests))
        assert sum(ends.values()) == requests
        assert min(ends.values()) > 0, ends
        check_nothing_is_lost(served)
        assert served.post("/flush_cache", None).status_code == 200
