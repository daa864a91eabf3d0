"""An event loop in a thread of its own, and how the scheduler's thread hears from it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Mailbox:
    """Calls that another thread wants made in this one; that thread calls ``wake`` after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = wake

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake()

    def deliver(self) -> None:
        """Make the calls that were posted so far, in order."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()


class LoopThread:
    """Runs an event loop until ``close``."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have ``function`` called in the loop, soon."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """End every task and the thread. Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
