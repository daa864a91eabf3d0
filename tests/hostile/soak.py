"""A long run at saturation: mixed lengths, aborts, bad requests, flushes. Nothing leaks, nothing is lost.

    python -m tests.hostile.soak --minutes 30 [--at-once 32] [-- server options]

Every request is accounted for on both sides: sent = completed + refused + aborted here, and started =
finished + aborted + failed in the server's metrics.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from tests.e2e.processes import Served
from tests.hostile.watch import Memory, finish, is_alive, parser, seconds_until_free, started
from tests.hostile.wire import Wire, request

MOST_GROWTH = 0.02
SAMPLES = 120
FLUSH_SECONDS = 2.0


def draw(dice: random.Random) -> tuple[str, bytes]:
    """(what is meant to happen, the request)."""
    shared = [50 + dice.randrange(4)] * dice.choice((0, 16, 64))
    body: dict[str, Any] = {
        "model": "tiny-random",
        "prompt": shared
        + [dice.randrange(8, 480) for _ in range(dice.randrange(1, dice.choice((8, 40, 120))))],
        "max_tokens": dice.randrange(1, dice.choice((4, 16, 60))),
        "temperature": dice.choice((0, 1)),
        "ignore_eos": True,
        "n": dice.choice((1, 1, 1, 1, 3)),
        "stream": dice.random() < 0.5,
    }
    kind = dice.choices(("completed", "aborted", "refused"), (80, 12, 8))[0]
    if kind == "refused":
        wrong = {"temperature": -1, "max_tokens": 10**9, "model": "other", "prompt": [], "extra": 1, "n": 0}
        name = dice.choice(sorted(wrong))
        body[name] = wrong[name]
    return kind, request("POST", "/v1/completions", json.dumps(body).encode())


async def _worker(url: str, dice: random.Random, until: float, counts: Counter[str]) -> None:
    wire = Wire(url)
    while time.monotonic() < until:
        meant, payload = draw(dice)
        counts["sent"] += 1
        if meant == "aborted":
            own = Wire(url)
            await own.send(payload)
            await asyncio.sleep(dice.random() * 0.2)
            own.vanish()
            counts["aborted"] += 1
            continue
        answer = await wire.ask(payload)
        if answer.status == 200 and b'"error"' not in answer.body[-500:]:
            counts["completed"] += 1
        elif 400 <= answer.status < 500:
            counts["refused"] += 1
        else:
            counts[f"lost: status {answer.status}"] += 1
        if (answer.status == 200) != (meant == "completed") and answer.status != 429:
            counts[f"unexpected: {meant} was answered {answer.status}"] += 1
    wire.close()


async def _flusher(url: str, until: float, counts: Counter[str]) -> None:
    wire = Wire(url)
    while time.monotonic() < until:
        answer = await wire.ask(request("POST", "/flush_cache?wait=0.2"))
        counts[f"flushes answered {answer.status}"] += 1
        await asyncio.sleep(FLUSH_SECONDS)
    wire.close()


async def _watch(memory: Memory, seconds: float, until: float) -> None:
    while time.monotonic() < until:
        await asyncio.to_thread(memory.note)
        await asyncio.sleep(seconds / SAMPLES)


async def soak(served: Served, seconds: float, *, at_once: int, seed: int, memory: Memory) -> Counter[str]:
    """Saturate the server for ``seconds``; counts of how requests ended."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    workers = [_worker(served.url, random.Random(seed * 1000 + one), until, counts) for one in range(at_once)]
    await asyncio.gather(_watch(memory, seconds, until), _flusher(served.url, until, counts), *workers)
    return counts


def unaccounted(served: Served, counts: Counter[str]) -> list[str]:
    """What does not add up, here and in the server."""
    found = [name for name in counts if name.startswith(("lost", "unexpected"))]
    if counts["sent"] != counts["completed"] + counts["refused"] + counts["aborted"]:
        found.append(f"sent {counts['sent']} is not completed + refused + aborted")
    seen = served.metrics()
    ended = sum(
        seen.get(f"interlock:{name}_total", 0)
        for name in ("request_success", "requests_aborted", "requests_failed")
    )
    if seen["interlock:requests_started_total"] != ended + seen["interlock:requests_live"]:
        found.append(
            f"the server started {seen['interlock:requests_started_total']} choices and ended {ended}"
        )
    if seen.get("interlock:requests_failed_total", 0):
        found.append(f"{seen['interlock:requests_failed_total']} choices failed")
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--at-once", type=int, default=32)
    given = options.parse_args()
    with started(given.flags) as served:
        memory = Memory(served)
        files = memory.open_files()
        seconds = given.minutes * 60
        counts = asyncio.run(soak(served, seconds, at_once=given.at_once, seed=given.seed, memory=memory))
        settled = seconds_until_free(served)
        missed = unaccounted(served, counts)
        alive, more_files = is_alive(served), memory.open_files() - files
    growth = memory.growth()
    missed += [f"memory grew by {growth:.1%}"] * (growth > MOST_GROWTH)
    missed += ["the server is not healthy"] * (not alive)
    missed += ["pages or slots are held"] * (settled >= 60)
    figures = {
        "minutes": given.minutes,
        "counts": dict(sorted(counts.items())),
        "memory_growth": round(growth, 4),
        "memory_growth_by_process": memory.growth_by_process(),
        "memory_mib": memory.mib(),
        "open_files_more": more_files,
        "free_after_seconds": round(settled, 3),
    }
    return finish("soak", figures, missed)


if __name__ == "__main__":
    sys.exit(main())
