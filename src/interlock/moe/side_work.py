"""Work beside other work of the same rank: on a second stream of a GPU, or on a thread of a CPU.

The other work goes between ``start`` and ``result``; what ``result`` returns may be used like anything that
was computed in its place. One piece of work is under way at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

T = TypeVar("T", covariant=True)


class Beside(Protocol[T]):
    """One piece of work that was started."""

    def result(self) -> T:
        """What it gives, or what it raised."""

    def abandon(self) -> T | None:
        """Come to an end without raising; what it gave, if it ran and gave something."""


class SideWork(Protocol):
    """Where work goes."""

    def start(self, call: Callable[[], T]) -> Beside[T]: ...

    def close(self) -> None: ...


def side_work(device: torch.device) -> SideWork:
    """The side of ``device``."""
    return StreamSide() if device.type == "cuda" else ThreadSide()


class StreamSide:
    """A second stream. ``result`` queues the work there, behind what was queued when it was started, and has
    the first stream wait for it. So work that makes the host wait does not keep the host from queueing what
    goes beside it, and graphs capture both streams.

    Memory needs no further care: what either stream allocates is used by the other between a start and a
    result only, and freed after that.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def start(self, call: Callable[[], T]) -> Beside[T]:
        return _OnStream(self._stream, call)

    def close(self) -> None:
        self._stream.synchronize()


class _OnStream(Beside[T]):
    def __init__(self, stream: torch.cuda.Stream, call: Callable[[], T]) -> None:
        self._stream, self._call = stream, call
        self._begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._begun.record()

    def result(self) -> T:
        self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            found = self._call()
        torch.cuda.current_stream().wait_stream(self._stream)
        return found

    def abandon(self) -> T | None:
        return None


class ThreadSide:
    """A thread of its own, in the caller's inference mode."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "beside", initializer=torch.set_num_threads, initargs=(1,))

    def start(self, call: Callable[[], T]) -> Beside[T]:
        inference = torch.is_inference_mode_enabled()

        def work() -> T:
            with torch.inference_mode(inference):
                return call()

        return _OnThread(self._thread.submit(work))

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class _OnThread(Beside[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self) -> T:
        return self._future.result()

    def abandon(self) -> T | None:
        with suppress(BaseException):
            return self._future.result()
        return None
