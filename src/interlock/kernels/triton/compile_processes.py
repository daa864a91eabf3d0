"""A rank's handle on the process that compiles Triton kernels for it."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple

import msgspec

from interlock.errors import StartupError
from interlock.kernels.base import CompileShare
from interlock.kernels.triton.compile_jobs import Job, Outcome

SERVER = "interlock.kernels.triton.compile_server"
GRACE_SECONDS = 0.5
WAYS_OUT = "the lines above this one, from its standard error, say more; if it was killed, memory was short"


class CompileProcesses:
    """Starts at once and imports the compiler beside whatever the caller does; ends with ``close``, or when
    this process ends.

    Args:
        share: how many kernels are compiled at a time, and which of them first.

    Raises:
        StartupError: the process cannot be started.
    """

    def __init__(self, share: CompileShare) -> None:
        try:
            self._server = subprocess.Popen(
                [sys.executable, "-m", SERVER, *map(str, astuple(share))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as problem:
            raise StartupError(f"cannot start the process that compiles Triton kernels: {problem}") from None
        self._told: queue.Queue[Outcome | None] = queue.Queue()
        self._open: dict[int, Job] = {}
        self._reader = threading.Thread(target=self._read, name="compile-outcomes", daemon=True)
        self._reader.start()

    def submit(self, job: Job) -> None:
        """Have ``job`` compiled."""
        assert self._server.stdin is not None
        self._open[job.number] = job
        with suppress(BrokenPipeError):  # ``outcomes`` tells how it ended
            self._server.stdin.write(msgspec.json.encode(job) + b"\n")
            self._server.stdin.flush()

    def outcomes(self) -> Iterator[tuple[Job, Outcome]]:
        """Every job that was submitted, as it ends.

        Raises:
            StartupError: the process has ended before they were done.
        """
        while self._open:
            outcome = self._told.get()
            if outcome is None:
                self._told.put(None)
                code = self._server.wait()
                waiting = ", ".join(sorted({job.name for job in self._open.values()}))
                raise StartupError(
                    f"the process that compiles Triton kernels ended with exit code {code} before it had "
                    f"compiled {waiting}; {WAYS_OUT}"
                )
            yield self._open.pop(outcome.number), outcome

    def close(self) -> None:
        """End the process and what it still compiles; idempotent."""
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):
            self._server.stdin.close()
        try:
            self._server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.terminate()
            self._server.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._server.stdout is not None
        decoder = msgspec.json.Decoder(Outcome)
        with self._server.stdout as lines:
            for line in lines:
                self._told.put(decoder.decode(line))
        self._told.put(None)
