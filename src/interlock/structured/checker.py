"""The front end's judge of grammars: what it lets pass compiles, in bounded time and memory."""

from __future__ import annotations

import asyncio
import logging
import select
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from interlock.errors import InterlockError
from interlock.plan.launch_plan import LaunchPlan
from interlock.structured.compiler import GrammarError
from interlock.structured.process import READY, Setup, read_frame, write_frame
from interlock.structured.spec import GrammarSpec

_log = logging.getLogger("interlock.server")
REMEMBERED = 4096
PREPARE_FROM_TOKENS = 8192
START_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Most that trying one grammar may take.

    Attributes:
        seconds: until the child process is killed.
        memory: bytes of address space beyond what the idle child has.
        processes: children, so grammars that are tried at once.
        text: characters of a grammar.
        pending: grammars that are tried or wait for it.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    processes: int = 2
    text: int = 256 * 1024
    pending: int = 64


class GrammarsBusy(InterlockError):
    """Too many grammars wait to be tried."""


class GrammarChecker:
    """Tries grammars in child processes, which start when they are first needed. Belongs to one event loop.

    What was found out is remembered by the grammar's key, so that the same schema costs nothing again.
    """

    def __init__(self, plan: LaunchPlan, limits: GrammarLimits = GrammarLimits()) -> None:
        self._limits = limits
        self._setup = Setup(
            model_path=str(plan.model_path),
            vocab_size=plan.card.vocab_size,
            stop_ids=plan.card.eos_token_ids,
            memory=limits.memory,
        )
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._trials: dict[bytes, asyncio.Task[str]] = {}
        self._free = asyncio.Semaphore(limits.processes)
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()

    async def check(self, spec: GrammarSpec) -> None:
        """Return when ``spec`` compiles.

        Raises:
            GrammarError: it does not, or not within the limits.
            GrammarsBusy: too many others wait to be tried.
        """
        if len(spec.text) > self._limits.text:
            raise GrammarError(f"it has {len(spec.text)} characters; at most {self._limits.text} are allowed")
        verdict = self._verdicts.get(spec.key)
        if verdict is None:
            task = self._trials.get(spec.key)
            if task is None:
                if len(self._trials) >= self._limits.pending:
                    raise GrammarsBusy(f"{len(self._trials)} other grammars are being tried")
                task = self._trials[spec.key] = asyncio.create_task(self._try(spec))
            verdict = await asyncio.shield(task)
        if verdict:
            raise GrammarError(verdict)

    async def prepare(self) -> None:
        """Start a child before it is needed, where its vocabulary takes long to read."""
        if self._setup.vocab_size < PREPARE_FROM_TOKENS:
            return
        async with self._free:
            child = _Child(self._setup)
            self._busy.add(child)
            try:
                await asyncio.to_thread(child.start)
            except GrammarError as error:
                _log.warning("constrained answers will be refused: %s", error)
                return
            finally:
                self._busy.discard(child)
            self._idle.append(child)

    def close(self) -> None:
        """End the child processes."""
        for child in (*self._idle, *self._busy):
            child.kill()
        self._idle.clear()

    async def _try(self, spec: GrammarSpec) -> str:
        try:
            async with self._free:
                child = self._idle.pop() if self._idle else _Child(self._setup)
                self._busy.add(child)
                try:
                    verdict = await asyncio.to_thread(child.ask, spec, self._limits.seconds)
                finally:
                    self._busy.discard(child)
                if child.alive:
                    self._idle.append(child)
        finally:
            del self._trials[spec.key]
        self._verdicts[spec.key] = verdict
        if len(self._verdicts) > REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict


class _Child:
    """One child process; used by one thread at a time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self.alive = True

    def ask(self, spec: GrammarSpec, seconds: float) -> str:
        """The verdict: "" or what is wrong. After a time-out or crash the child is not ``alive``.

        Raises:
            GrammarError: the child does not start, whatever the grammar is.
        """
        try:
            self.start()
            self._send(spec)
            answer = self._receive(seconds)
        except TimeoutError:
            self.kill()
            return f"compiling it takes longer than {seconds:g} seconds"
        except (OSError, msgspec.DecodeError):
            answer = None
        if answer is None:
            self.kill()
            return "compiling it ends the compiler (it takes too much memory or nests too deeply)"
        return answer

    def kill(self) -> None:
        self.alive = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            GrammarError: it does not start.
        """
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "interlock.structured.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._send(self._setup)
        try:
            answer = self._receive(START_SECONDS)
        except TimeoutError:
            answer = None
        if answer != READY:
            self.kill()
            raise GrammarError(answer or "the grammar compiler of this server does not start")

    def _send(self, message: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        write_frame(self._process.stdin, message)

    def _receive(self, seconds: float) -> str | None:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        frame = read_frame(self._process.stdout)
        return None if frame is None else msgspec.msgpack.decode(frame, type=str)
