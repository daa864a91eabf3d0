"""Offers load and collects what happened. In an open loop a slow server delays nobody's due time.

A request is due at its time whether or not earlier ones have ended (no coordinated omission); if this client
is late itself, that is counted in the latency and reported as lateness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from interlock.bench.serving.arrivals import Arrivals
from interlock.bench.serving.exchange import Ask, Exchange, Sender


async def offer(
    sender: Sender,
    asks: Sequence[Ask],
    arrivals: Arrivals,
    *,
    seed: int,
    request_timeout: float,
    duration: float | None = None,
    done: Callable[[Exchange], None] = lambda _: None,
) -> list[Exchange]:
    """Send ``asks`` and wait for all of them, at most until each one's time limit.

    Args:
        request_timeout: seconds after which a request is given up and counted as incomplete, from when it
            was due (open loop) or sent (closed).
        duration: seconds after which no more requests are sent in a closed loop and what still runs is cut
            (counted as incomplete); in an open loop what is due later is not sent.
        done: called with each exchange at its end.
    """
    run = _Run(sender, request_timeout, done)
    if arrivals.is_open:
        due = arrivals.times(len(asks), seed)
        kept = [(ask, at) for ask, at in zip(asks, due, strict=True) if duration is None or at <= duration]
        return await run.open_loop(kept, duration)
    return await run.closed_loop(asks, arrivals.concurrency, duration)


class _Run:
    def __init__(self, sender: Sender, request_timeout: float, done: Callable[[Exchange], None]) -> None:
        self._sender = sender
        self._timeout = request_timeout
        self._done = done
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()

    async def open_loop(self, work: Sequence[tuple[Ask, float]], duration: float | None) -> list[Exchange]:
        tasks = []
        for index, (ask, at) in enumerate(work):
            due = self._start + at
            if due > self._clock():
                await asyncio.sleep(due - self._clock())
            exchange = Exchange(index=index, asked_tokens=ask.max_tokens, due=due)
            tasks.append(asyncio.create_task(self._one(ask, exchange, duration)))
        return list(await asyncio.gather(*tasks))

    async def closed_loop(
        self, asks: Sequence[Ask], concurrency: int, duration: float | None
    ) -> list[Exchange]:
        waiting = iter(enumerate(asks))
        ended: list[Exchange] = []

        async def worker() -> None:
            for index, ask in waiting:
                now = self._clock()
                if duration is not None and now >= self._start + duration:
                    return
                exchange = Exchange(index=index, asked_tokens=ask.max_tokens, due=now)
                ended.append(await self._one(ask, exchange, duration))

        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(asks)))))
        return sorted(ended, key=lambda exchange: exchange.index)

    async def _one(self, ask: Ask, exchange: Exchange, duration: float | None) -> Exchange:
        end = exchange.due + self._timeout
        if duration is not None:
            end = min(end, max(self._start + duration, exchange.due))
        try:
            async with asyncio.timeout_at(end):
                await self._sender.send(ask, exchange)
        except TimeoutError:
            exchange.ended = self._clock()
            exchange.status, exchange.error = "incomplete", f"cut after {exchange.ended - exchange.due:.3g} s"
        self._done(exchange)
        return exchange
