"""Compiles Triton kernels for a rank: ``python -m interlock.kernels.triton.compile_server`` and a share.

Its arguments are the fields of ``CompileShare``. It reads ``Job`` lines, writes an ``Outcome`` line as each
ends, and ends with its input. Every job is a fork of this process, which has imported the compiler once, so
jobs share neither the import nor an interpreter lock (most of the time of a small kernel is Python). It never
touches a GPU.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib
import os
import selectors
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from interlock.kernels.base import CompileShare
from interlock.kernels.triton.compile_jobs import Job, Outcome, Queue

PRELOADED = "interlock.kernels.triton.kernels"
LONGEST_ERROR = 4000
BLOCK = 1 << 16


def main() -> None:
    jobs, outcomes = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a compiler prints must not land between the outcomes
    _import_the_compiler()
    _Server(jobs, outcomes, CompileShare(*map(int, sys.argv[1:]))).run()


def _import_the_compiler() -> None:
    from triton.runtime.cache import triton_key

    importlib.import_module(PRELOADED)
    triton_key()


@dataclass(frozen=True, slots=True)
class _Running:
    """A job that is being compiled. ``reply``: read end of the pipe that its process closes when it ends."""

    job: Job
    process: int
    reply: int
    begun: float


class _Server:
    def __init__(self, jobs: int, outcomes: int, share: CompileShare) -> None:
        self._jobs, self._outcomes, self._processes = jobs, outcomes, share.processes
        self._decoder = msgspec.json.Decoder(Job)
        self._waiting = Queue(share)
        self._running: dict[int, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self._unfinished = b""

    def run(self) -> None:
        self._selector.register(self._jobs, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._jobs:
                    if not self._read():
                        self._kill()
                        return
                else:
                    self._finish(self._running.pop(key.fd))
            while self._waiting and len(self._running) < self._processes:
                self._begin(self._waiting.take())

    def _read(self) -> bool:
        """Take in what has arrived; False at the end of the input."""
        block = os.read(self._jobs, BLOCK)
        *lines, self._unfinished = (self._unfinished + block).split(b"\n")
        for line in lines:
            self._waiting.put(self._decoder.decode(line))
        return bool(block)

    def _begin(self, job: Job) -> None:
        try:
            importlib.import_module(job.module)
        except ImportError as problem:
            self._tell(Outcome(number=job.number, error=f"{job.module} cannot be imported: {problem}"))
            return
        reply, answer = os.pipe()
        begun = time.monotonic()
        process = os.fork()
        if process == 0:
            os.close(reply)
            _compile_and_exit(job, answer)
        os.close(answer)
        self._running[reply] = _Running(job, process, reply, begun)
        self._selector.register(reply, selectors.EVENT_READ)

    def _finish(self, running: _Running) -> None:
        self._selector.unregister(running.reply)
        text = b""
        while block := os.read(running.reply, BLOCK):
            text += block
        os.close(running.reply)
        _, status, used = os.wait4(running.process, 0)
        code = os.waitstatus_to_exitcode(status)
        error = text.decode(errors="replace")
        if code and not error:
            error = f"its compiler ended with {_meaning(code)}"
        self._tell(
            Outcome(
                number=running.job.number,
                seconds=time.monotonic() - running.begun,
                cpu_seconds=used.ru_utime + used.ru_stime,
                error=error,
            )
        )

    def _tell(self, outcome: Outcome) -> None:
        line = msgspec.json.encode(outcome) + b"\n"
        while line:
            line = line[os.write(self._outcomes, line) :]

    def _kill(self) -> None:
        """Nobody waits any more: what is still compiled is of no use."""
        for running in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(running.process, signal.SIGKILL)


def _compile_and_exit(job: Job, answer: int) -> None:
    """In the fork: compile, write the error if there is one, and end without this process's exit handlers."""
    code = 1
    try:
        error = compile_job(job)
        if error:
            os.write(answer, error.encode()[:LONGEST_ERROR])
        code = 1 if error else 0
    finally:
        os._exit(code)


def compile_job(job: Job) -> str:
    """Compile into Triton's cache on disk; returns what went wrong, or ""."""
    from triton.runtime import driver

    try:
        driver.set_active(_Machine(job.target))
        kernel: Any = importlib.import_module(job.module)
        for part in job.name.split("."):
            kernel = getattr(kernel, part)
        kernel.hash = job.source_key
        kernel.preload(job.specialisation)
    except Exception as problem:
        return _told(problem)
    return ""


def _told(problem: BaseException) -> str:
    """The error and what caused it, with the place of the latter."""
    causes = [problem]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    where = traceback.extract_tb(causes[-1].__traceback__)[-1:]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in where)
    return " because of ".join(f"{type(cause).__name__}: {cause}" for cause in causes) + place


class _Machine:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, target: tuple[str, int, int]) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self._target)


def _meaning(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"signal {signal.Signals(-code).name}{hint}"


if __name__ == "__main__":
    main()
