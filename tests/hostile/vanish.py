"""Clients that vanish at random moments: while sending, waiting, or reading. Then all is free again.

python -m tests.hostile.vanish --clients 1000 [--at-once 64] [-- server options]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

from tests.e2e.processes import Served
from tests.hostile.watch import Memory, finish, is_alive, parser, seconds_until_free, started
from tests.hostile.wire import Wire, request

FREE_SECONDS = 1.0


def _request(dice: random.Random) -> bytes:
    body: dict[str, Any] = {
        "model": "tiny-random",
        "prompt": [dice.randrange(8, 480) for _ in range(dice.randrange(1, 120))],
        "max_tokens": dice.randrange(1, 130),
        "ignore_eos": True,
        "n": dice.choice((1, 1, 1, 4)),
        "stream": dice.random() < 0.6,
    }
    return request("POST", "/v1/completions", json.dumps(body).encode())


async def _client(url: str, dice: random.Random, seen: Counter[str]) -> None:
    """One client from its connection to its sudden end."""
    wire, payload = Wire(url), _request(dice)
    moment = dice.choice(("sending", "waiting", "waiting", "reading", "reading"))
    try:
        if moment == "sending":
            await wire.send(payload[: dice.randrange(1, len(payload))])
        else:
            await wire.send(payload)
        if moment == "reading":
            wanted = dice.randrange(1, 4000)
            while wanted > 0 and (got := await asyncio.wait_for(wire.some(wanted), 5)):
                wanted -= len(got)
        else:
            await asyncio.sleep(dice.random() ** 2 * 0.5)
        seen[moment] += 1
    except (TimeoutError, ConnectionError):
        seen["tired of waiting"] += 1
    finally:
        if dice.random() < 0.5:
            wire.vanish()
        else:
            wire.close()


async def vanish(served: Served, clients: int, *, at_once: int, seed: int) -> Counter[str]:
    """Run ``clients``, ``at_once`` at a time; at which moment each left."""
    seen: Counter[str] = Counter()
    gate = asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        async with gate:
            await _client(served.url, random.Random(seed * 1_000_003 + index), seen)

    await asyncio.gather(*(one(index) for index in range(clients)))
    return seen


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--clients", type=int, default=1000)
    options.add_argument("--at-once", type=int, default=64)
    given = options.parse_args()
    with started(given.flags) as served:
        memory = Memory(served)
        files = memory.open_files()
        seen = asyncio.run(vanish(served, given.clients, at_once=given.at_once, seed=given.seed))
        settled = seconds_until_free(served)
        alive, more_files = is_alive(served), memory.open_files() - files
    missed = [f"free after {settled:.2f} s"] * (settled > FREE_SECONDS)
    missed += ["the server is not healthy"] * (not alive)
    figures = {
        "clients": given.clients,
        "left_while": dict(seen),
        "free_after_seconds": round(settled, 3),
        "open_files_more": more_files,
    }
    return finish("vanish", figures, missed)


if __name__ == "__main__":
    sys.exit(main())
