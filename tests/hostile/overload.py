"""Ten times the sustainable rate: who is let in is served as well as ever, the others hear 429 at once.

    python -m tests.hostile.overload [--seconds 30] [--rounds 3] [--factor 10] [-- server options]

*Sustainable* is what as many clients as there are slots get through, each sending again when it is answered;
the time between tokens then is the *unloaded* one, since nobody waits. Then requests come at ``factor`` times
that rate, whatever is answered. The server has ``--max-running-requests`` slots and a short queue. Both take
turns, so that what else the machine does in the meantime slows both.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

from tests.e2e.processes import Served
from tests.hostile.watch import finish, is_alive, parser, started
from tests.hostile.wire import Wire, request

MOST_SLOWER = 2.0
SLOTS = 8
QUEUE = 8
TOKENS = 32
SERVER = ("--max-running-requests", str(SLOTS), "--max-waiting-requests", str(QUEUE))


@dataclass
class Seen:
    """Times in seconds: ``gaps`` between tokens of accepted requests, ``refusals`` until a 429 was there."""

    gaps: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    completed: int = 0
    refused: int = 0
    other: int = 0

    def add(self, more: Seen) -> None:
        self.gaps += more.gaps
        self.refusals += more.refusals
        self.firsts += more.firsts
        self.completed += more.completed
        self.refused += more.refused
        self.other += more.other


def _payload(dice: random.Random) -> bytes:
    body = {
        "model": "tiny-random",
        "prompt": [dice.randrange(8, 480) for _ in range(16)],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    return request("POST", "/v1/completions", json.dumps(body).encode(), "Connection: close")


async def _one(url: str, dice: random.Random, seen: Seen) -> None:
    wire = Wire(url)
    begun = time.perf_counter()
    try:
        await wire.send(_payload(dice))
        head = await wire.some(65536)
        status = int(head.split()[1])
        if status != 200:
            seen.refused += status == 429
            seen.other += status != 429
            if status == 429:
                seen.refusals.append(time.perf_counter() - begun)
            return
        last, count = time.perf_counter(), head.count(b"data: ")
        seen.firsts.append(last - begun)
        text = head
        while chunk := await wire.some(65536):
            now, more = time.perf_counter(), chunk.count(b"data: ")
            if more and count:
                seen.gaps += [(now - last) / more] * more
            last, count, text = now, count + more, text[-200:] + chunk
        seen.completed += b"[DONE]" in text
        seen.other += b"[DONE]" not in text
    except (ConnectionError, IndexError, ValueError):
        seen.other += 1
    finally:
        wire.close()


async def sustained(url: str, seconds: float, seed: int) -> tuple[Seen, float]:
    """As many clients as slots, each sending again at once: (what they saw, requests a second)."""
    seen, until = Seen(), time.monotonic() + seconds

    async def client(index: int) -> None:
        dice = random.Random(seed + index)
        while time.monotonic() < until:
            await _one(url, dice, seen)

    begun = time.monotonic()
    await asyncio.gather(*(client(index) for index in range(SLOTS)))
    return seen, seen.completed / (time.monotonic() - begun)


async def flooded(url: str, seconds: float, rate: float, seed: int) -> Seen:
    """Requests at ``rate`` a second, whatever becomes of them."""
    seen, dice, tasks = Seen(), random.Random(seed), set[asyncio.Task[None]]()
    begun, sent = time.monotonic(), 0
    while (now := time.monotonic() - begun) < seconds:
        for _ in range(int(now * rate) - sent):
            tasks.add(asyncio.create_task(_one(url, random.Random(dice.random()), seen)))
            sent += 1
        await asyncio.sleep(0.002)
        tasks -= {task for task in tasks if task.done()}
    await asyncio.gather(*tasks)
    return seen


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else 0.0


def measure(
    served: Served, seconds: float, factor: float, seed: int, rounds: int = 1
) -> tuple[dict[str, object], list[str]]:
    """Both loads for ``seconds`` each, in ``rounds`` turns: (figures, bars that were missed)."""
    calm, flood, offered, spent = Seen(), Seen(), 0.0, 0.0
    asyncio.run(sustained(served.url, min(5.0, seconds), seed))
    for turn in range(rounds):
        part, rate = asyncio.run(sustained(served.url, seconds / rounds, seed + turn))
        calm.add(part)
        flood.add(asyncio.run(flooded(served.url, seconds / rounds, factor * rate, seed + turn)))
        offered += factor * rate * seconds / rounds
        spent += part.completed / rate
    slower = p99(flood.gaps) / p99(calm.gaps)
    missed = [f"p99 between tokens is {slower:.2f} times the unloaded"] * (slower > MOST_SLOWER)
    missed += [f"{flood.other} requests ended otherwise"] * bool(flood.other)
    missed += ["nobody was refused"] * (not flood.refused) + ["nobody was served"] * (not flood.completed)
    missed += ["the server is not healthy"] * (not is_alive(served))
    figures: dict[str, object] = {
        "sustainable_per_second": round(calm.completed / spent, 1),
        "offered_per_second": round(offered / seconds, 1),
        "completed_per_second": round(flood.completed / seconds, 1),
        "completed": flood.completed,
        "refused": flood.refused,
        "other": flood.other,
        "itl_p50_ms_unloaded": round(statistics.median(calm.gaps) * 1e3, 2),
        "itl_p50_ms_overloaded": round(statistics.median(flood.gaps) * 1e3, 2),
        "itl_p99_ms_unloaded": round(p99(calm.gaps) * 1e3, 2),
        "itl_p99_ms_overloaded": round(p99(flood.gaps) * 1e3, 2),
        "itl_p99_ratio": round(slower, 2),
        "ttft_p99_ms_overloaded": round(p99(flood.firsts) * 1e3, 1),
        "refusal_p50_ms": round(statistics.median(flood.refusals or [0]) * 1e3, 2),
        "refusal_p99_ms": round(p99(flood.refusals) * 1e3, 2),
    }
    return figures, missed


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=30)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--factor", type=float, default=10)
    given = options.parse_args()
    with started([*SERVER, *given.flags]) as served:
        figures, missed = measure(served, given.seconds, given.factor, given.seed, given.rounds)
    return finish("overload", figures, missed)


if __name__ == "__main__":
    sys.exit(main())
