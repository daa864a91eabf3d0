"""The ranks of a process without the front end: another node's, or one that a launcher started.

It tells the front end which of its ranks ended, and hears from it how the engine ended, so that every node
ends with the same first error. A signal lets running requests finish: the front end is told, and stops all.
"""

from __future__ import annotations

import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
import zmq

from interlock.engine.endpoints import Endpoints, Linked, Place, socket_directory
from interlock.engine.messages import EngineEnded, NodeLeaving, RankEnded, RankFailed
from interlock.engine.rank_processes import RankProcesses
from interlock.engine.stacks import stacks_text
from interlock.engine.supervisor import Exit, Verdict
from interlock.errors import EngineDeadError
from interlock.plan.launch_plan import LaunchPlan

logger = logging.getLogger("interlock")

TURN_MS = 100
NEWS_SECONDS = 6.0
_Report = msgspec.msgpack.Decoder(Linked | RankFailed)
_News = msgspec.msgpack.Decoder(EngineEnded)


class RemoteNode:
    """Runs ``place.ranks`` to their end.

    Args:
        leave_seconds: how long a signal lets the engine go on.
    """

    def __init__(self, plan: LaunchPlan, place: Place, *, leave_seconds: float) -> None:
        self._plan = plan
        self._place = place
        self._leave_seconds = leave_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.setsockopt(zmq.IPV6, 1)
        self._directory = socket_directory()
        self._reports = self._context.socket(zmq.PULL)
        self._news = self._context.socket(zmq.SUB)
        self._front_end: zmq.Socket[bytes] | None = None
        self._verdict = Verdict()
        self._told: set[int] = set()
        self._end: EngineEnded | None = None
        self._leave_at: float | None = None

    def run(self) -> int:
        """Returns the exit code of an orderly end.

        Raises:
            EngineDeadError: the engine failed; the first error, as far as it is known here.
        """
        address = f"ipc://{self._directory}/reports"
        self._reports.bind(address)
        try:
            with _on_signal(self._leave):
                return self._run_ranks(address)
        finally:
            self._context.destroy(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)

    def _run_ranks(self, reports: str) -> int:
        first, last = self._place.ranks[0], self._place.ranks[-1]
        logger.info(
            "node %d: ranks %d to %d of %d; requests are answered on node 0, which is awaited at %s",
            *(self._place.node_rank, first, last, self._plan.tp_size, self._plan.dist_init),
        )
        store = self._place.resolved_store()
        with closing(RankProcesses(self._plan, self._place, store=store, reports=reports)) as ranks:
            self._watch(ranks)
            if self._end is not None and self._end.is_stall:
                logger.error("%s", stacks_text(ranks.stacks()))
            return self._outcome(ranks.exits())

    def _watch(self, ranks: RankProcesses) -> None:
        """Until the front end has spoken, or a rank is gone and there was time to say why, or time is up."""
        give_up: float | None = None
        while self._end is None:
            self._read()
            exits = ranks.exits()
            self._tell(exits)
            now = time.monotonic()
            if self._leave_at is not None and now > self._leave_at:
                return
            if (exits or self._verdict.failures) and give_up is None:
                give_up = now + (NEWS_SECONDS if self._front_end else 0.0)
            if give_up is not None and now > give_up:
                return

    def _outcome(self, exits: list[Exit]) -> int:
        if self._end is not None:
            if self._end.reason:
                raise EngineDeadError(self._end.reason)
            return 0
        if self._leave_at is not None:
            return 0 if self._front_end else 128 + signal.SIGTERM
        self._verdict.exits = [exit for exit in exits if exit.code]
        if self._verdict.has_evidence:
            raise EngineDeadError(
                self._verdict.first_error() + "\nand nothing more was heard from node 0 and its front end"
            )
        return 0

    def _read(self) -> None:
        if self._reports.poll(TURN_MS):
            match _Report.decode(self._reports.recv()):
                case Linked(endpoints):
                    self._link(endpoints)
                case RankFailed() as failure:
                    self._verdict.failures.append(failure)
        if self._front_end is not None and self._news.poll(0):
            self._end = _News.decode(self._news.recv())

    def _link(self, endpoints: Endpoints) -> None:
        if self._front_end is not None:
            return
        self._news.connect(endpoints.news)
        self._news.subscribe(b"")
        self._front_end = self._context.socket(zmq.PUSH)
        self._front_end.connect(endpoints.outputs)
        if self._leave_at is not None:
            self._say(NodeLeaving(node_rank=self._place.node_rank))

    def _tell(self, exits: list[Exit]) -> None:
        for exit in exits:
            if self._front_end is not None and exit.rank not in self._told:
                self._told.add(exit.rank)
                self._say(RankEnded(rank=exit.rank, code=exit.code))

    def _leave(self) -> None:
        """A signal: ask the front end to end the engine. A second one, or a very early one, ends now."""
        if self._leave_at is not None or self._front_end is None:
            self._leave_at = 0.0
            return
        logger.info("told to end: running requests may finish")
        self._leave_at = time.monotonic() + self._leave_seconds
        self._say(NodeLeaving(node_rank=self._place.node_rank))

    def _say(self, message: RankEnded | NodeLeaving) -> None:
        assert self._front_end is not None
        self._front_end.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)


@contextmanager
def _on_signal(action: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``action`` while the block runs."""
    before = {
        number: signal.signal(number, lambda *_: action()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
