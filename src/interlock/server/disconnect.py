"""Ends work for a client that went away, at any stage: queued, in prefill or between tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], *, on_disconnect: Callable[[], Awaitable[None]]
) -> T:
    """Run ``work``; once ``receive`` reports that the client is gone, await ``on_disconnect`` and cancel it.

    The request body must have been read before. Cancellation of the caller cancels ``work`` too, and
    ``work`` has always ended (its clean-up included) when this returns or raises.

    Raises:
        ClientDisconnect: the client went away first.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        await on_disconnect()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
