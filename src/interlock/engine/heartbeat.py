"""Signs of life: what a rank's loop is doing, told from a side thread, and the end of an orphaned rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import zmq

from interlock.engine.messages import Heartbeat

HEARTBEAT_SECONDS = 0.5


class Activity:
    """What the loop of a rank is doing right now; written by the loop, read by the heartbeat."""

    def __init__(self, name: str) -> None:
        self.iteration = 0
        self._state = (name, time.monotonic())

    def enter(self, name: str) -> None:
        self._state = (name, time.monotonic())

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
        os._exit(3)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
