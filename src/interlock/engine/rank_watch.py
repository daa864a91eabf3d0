"""Watches all ranks of an engine until one fails, and finds out which one failed first."""

from __future__ import annotations

import asyncio
import time

from interlock.engine.messages import Heartbeat, RankEnded, RankFailed
from interlock.engine.rank_processes import RankProcesses
from interlock.engine.stacks import stacks_text
from interlock.engine.supervisor import PEER_SILENCE_SECONDS, Exit, Pulse, Verdict
from interlock.plan.launch_plan import LaunchPlan

WATCH_SECONDS = 0.1
EVIDENCE_SECONDS = 0.5
CAUSE_SECONDS = 4.0


class RankWatch:
    """Joins what ranks tell, how their processes end, and their silences into one first error.

    Args:
        ranks: the processes of this node; other nodes tell of theirs (``RankEnded``).

    Attributes:
        stacks: after a stall, where the ranks of this node were.
    """

    def __init__(self, plan: LaunchPlan, ranks: RankProcesses) -> None:
        self.stacks = ""
        self._ranks = ranks
        self._verdict = Verdict()
        self._elsewhere: list[Exit] = []
        self._pulse = Pulse(range(plan.tp_size), plan.stall_timeout)
        self._stopped = False

    @property
    def is_stall(self) -> bool:
        return bool(self._verdict.stalls)

    def note(self, message: Heartbeat | RankFailed | RankEnded) -> None:
        """A rank, or the launcher of another node, tells something."""
        match message:
            case Heartbeat():
                self._pulse.note(message)
            case RankFailed():
                self._verdict.failures.append(message)
                self._pulse.forget(message.rank)
            case RankEnded():
                self._elsewhere.append(Exit(message.rank, message.code))

    def stop(self) -> None:
        """Ranks end from now on because they are told to."""
        self._stopped = True

    async def first_error(self) -> str:
        """Wait for the first sign of trouble, and a moment in which more may be told; "" once stopped."""
        while not self._stopped:
            await asyncio.sleep(WATCH_SECONDS)
            self._look()
            self._verdict.stalls = self._pulse.stalled()
            if self._verdict.has_evidence and not self._stopped:
                await self._await_cause()
                if self._verdict.stalls:
                    self.stacks = stacks_text(await asyncio.to_thread(self._ranks.stacks))
                return self._verdict.first_error()
        return ""

    async def _await_cause(self) -> None:
        """Give the rank that failed first a moment to be known, when only its peers have spoken.

        A peer's error says that a rank did not answer in time, so shorter silences count now.
        """
        await asyncio.sleep(EVIDENCE_SECONDS)
        deadline = time.monotonic() + CAUSE_SECONDS
        while True:
            self._look()
            if self._verdict.has_cause or time.monotonic() > deadline:
                return
            self._verdict.stalls = self._pulse.silent(PEER_SILENCE_SECONDS)
            await asyncio.sleep(WATCH_SECONDS)

    def _look(self) -> None:
        self._verdict.exits = self._ranks.exits() + self._elsewhere
