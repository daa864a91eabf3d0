"""An event loop whose clock moves only when everyone waits: delays are exact, and tests take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """``busy`` makes the client itself lose time, as a blocked event loop would."""

    def __init__(self) -> None:
        super().__init__(_NeverWaits(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def busy(self, seconds: float) -> None:
        self.now += seconds


class _NeverWaits(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everyone waits and nobody will come")
        if not ready and timeout:
            self._loop.now += timeout
        return ready


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
