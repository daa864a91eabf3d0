"""Signs of life: what a rank's loop is doing, told from a side thread, and the end of an orphaned rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import zmq

from interlock.engine.messages import Heartbeat, RankLoad

HEARTBEAT_SECONDS = 0.5
REPORT_SECONDS = 1.0
LAUNCHER_IS_GONE = 3
"""Exit code of a rank that ends because the process that started it has."""


class Activity:
    """What the loop of a rank is doing right now; written by the loop, read by the heartbeat.

    Attributes:
        report: called by the loop about once a second; what it returns, if anything, is sent.
    """

    def __init__(self, name: str) -> None:
        self.iteration = 0
        self.report: Callable[[], RankLoad | None] | None = None
        self._state = (name, time.monotonic())
        self._report_at = 0.0
        self._news: RankLoad | None = None

    def enter(self, name: str) -> None:
        now = time.monotonic()
        self._state = (name, now)
        if self.report is not None and now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            self._news = self.report() or self._news

    def take_news(self) -> RankLoad | None:
        """The latest report that was not taken yet. Reports are sums, so a lost one does no harm."""
        news, self._news = self._news, None
        return news

    def next_iteration(self) -> None:
        self.iteration += 1

    def snapshot(self, rank: int) -> Heartbeat:
        name, since = self._state
        return Heartbeat(
            rank=rank, iteration=self.iteration, activity=name, activity_seconds=time.monotonic() - since
        )


@contextmanager
def heartbeat(
    context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int, activity: Activity
) -> Iterator[None]:
    """Send a ``Heartbeat`` to ``address`` at once and every half second while the block runs.

    The first comes at once so that a rank that stalls right after a quick start is known to be silent.
    """
    stop = threading.Event()

    def beat() -> None:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        try:
            while True:
                with suppress(zmq.Again):
                    socket.send(msgspec.msgpack.encode(activity.snapshot(rank)), zmq.NOBLOCK)
                    if (news := activity.take_news()) is not None:
                        socket.send(msgspec.msgpack.encode(news), zmq.NOBLOCK)
                if stop.wait(HEARTBEAT_SECONDS):
                    return
        finally:
            socket.close()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def watch_launcher(descriptor: int) -> None:
    """End this process at once when the pipe ``descriptor``, which the launcher holds open, ends."""

    def watch() -> None:
        while os.read(descriptor, 1):
            continue
        os._exit(LAUNCHER_IS_GONE)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
