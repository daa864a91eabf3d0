"""Servers as a user starts them: processes with flags, a ready line, signals and exit codes."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
END_SECONDS = 60.0
SERVE = ("-m", "interlock", "serve", "tiny-random")
BASE = ("--threads", "1", "--kv-memory", "64MiB", "--dtype", "float32", "--max-model-len", "256")
PROMPTS = [[(5 * row + 13 * column + 15) % 480 + 8 for column in range(17)] for row in range(3)]
MARK = "TEST_PROCESS_MARK"
READY = re.compile(r"ready: (http://[^\s\"]+)")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without options and launchers of its own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("INTERLOCK_", "TORCHELASTIC_")) and name not in ("RANK", "WORLD_SIZE")
    }
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **changes}


class Process:
    """A child whose standard error is read as it comes. ``prefix`` runs before the interpreter."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = secrets.token_hex(8)
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**(env or environment()), MARK: self._mark},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """Wait for a line of output; fails with the whole output when the process ends or is too slow."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            ended = self.popen.poll() is not None
            if ended:
                self._reader.join(10)
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            assert not ended, f"ended with {self.popen.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {pattern!r} after {START_SECONDS} s:\n{self.text}"
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = END_SECONDS) -> int:
        """The exit code."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds} s:\n{self.text}") from None
        self._reader.join(10)
        return code

    def ranks(self) -> list[psutil.Process]:
        """Rank processes below this one, in order of their start."""
        found = []
        for child in psutil.Process(self.popen.pid).children(recursive=True):
            try:
                if "interlock.engine.worker" in child.cmdline():
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda child: child.pid)

    def command_line(self) -> list[str]:
        """What every user of the machine sees."""
        return psutil.Process(self.popen.pid).cmdline()

    def survivors(self) -> list[psutil.Process]:
        """Processes that it started, directly or not, and that still run, whoever is their parent now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        """Kill it and everything that it started, whatever state it is in."""
        self.popen.kill()
        self.popen.wait()
        for process in self.survivors():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))


@dataclass(frozen=True)
class Served:
    """A server that said ready."""

    process: Process
    url: str

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def receipts(self) -> dict[int, dict[str, Any]]:
        return {int(rank): items for rank, items in sorted(self.get("/plan").json()["receipts"].items())}

    def provenance(self, item: str) -> dict[str, str]:
        found: dict[str, str] = self.get("/plan").json()["plan"]["provenance"][item]
        return found

    def metrics(self) -> dict[str, float]:
        """Sum over labels of each metric; ``name{state=...}`` for those with a state."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            bare = name.partition("{")[0]
            totals[bare] = totals.get(bare, 0.0) + float(value)
            totals[name] = float(value)
        return totals


@contextmanager
def running(
    arguments: Sequence[str], *, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """A process that a test leaves in any state; one that ended by itself must have left no orphan."""
    process = Process(arguments, prefix=prefix, env=env)
    try:
        yield process
        if process.popen.poll() is not None:
            wait_until(
                lambda: not process.survivors(), f"no orphan of a process that ended:\n{process.text}", 5
            )
    finally:
        process.end()


@contextmanager
def serving(
    *flags: str, base: Sequence[str] = BASE, env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """``interlock serve tiny-random --port 0 FLAGS``, ready; ended as a user ends it, which must succeed."""
    with running([*SERVE, *base, "--port", "0", *flags], env=env) as process:
        served = Served(process, process.wait_for(READY)[1])
        yield served
        if process.popen.poll() is None:
            process.signal(signal.SIGTERM)
            assert process.wait() == 0, process.text


def answers(get: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[list[list[str]], list[list[float]]]:
    """Greedy tokens and their log-probabilities for ``PROMPTS``; ``get`` posts to /v1/completions."""
    body = {
        "model": "tiny-random",
        "prompt": PROMPTS,
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
    }
    choices = sorted(get(body)["choices"], key=lambda choice: choice["index"])
    scores = [choice["logprobs"] for choice in choices]
    return [score["tokens"] for score in scores], [score["token_logprobs"] for score in scores]


def assert_same_answers(
    mine: tuple[list[list[str]], list[list[float]]], other: tuple[list[list[str]], list[list[float]]]
) -> None:
    assert mine[0] == other[0]
    largest = max(
        abs(a - b)
        for row, twin in zip(mine[1], other[1], strict=True)
        for a, b in zip(row, twin, strict=True)
    )
    assert largest < 1e-5


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
