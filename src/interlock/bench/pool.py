"""Engines of several arms on one machine: all kept alive where they fit, else one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

from interlock.bench.session import EngineSession, Session
from interlock.errors import Refusal
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan

MEMORY_SHARE: Final = 0.8
"""Share of the free memory that arms which live side by side may plan to use together."""


def fit_together(plans: Sequence[LaunchPlan], facts: MachineFacts) -> bool:
    """Whether all arms may be alive at once, from the planner's memory estimates."""
    if any(plan.device != "cpu" for plan in plans):
        free = min((device.memory_free for device in facts.devices), default=0)
        return sum(plan.memory.total * plan.ranks_per_gpu for plan in plans) <= free * MEMORY_SHARE
    return sum(plan.memory.total * plan.tp_size for plan in plans) <= facts.memory_available * MEMORY_SHARE


class ArmPool(AbstractContextManager["ArmPool"]):
    """Sessions by arm name.

    Args:
        plans: arm name -> plan, in the order of the command line.
        keep: all stay alive, and only the one that is asked for works; else asking for one ends the others.
        start: makes a session; tests give a stub.
    """

    def __init__(
        self,
        plans: Mapping[str, LaunchPlan],
        *,
        keep: bool,
        start: Callable[[LaunchPlan], Session] = EngineSession,
    ) -> None:
        self.plans = dict(plans)
        self.keep = keep
        self._start = start
        self._live: dict[str, Session] = {}
        self.receipts: dict[str, dict[int, dict[str, object]]] = {}
        self.starts = 0

    def get(self, name: str) -> Session:
        """The running session of an arm, started if need be."""
        if name not in self._live:
            if not self.keep:
                self._close_all()
            self._live[name] = self._start(self.plans[name])
            self.receipts[name] = self._live[name].receipts
            self.starts += 1
        return self._live[name]

    def _close_all(self) -> None:
        while self._live:
            self._live.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_all()


def turns_of(
    arms: Sequence[str], points: Sequence[int], rounds: int, *, keep: bool
) -> Iterator[tuple[int, str, int]]:
    """(round, arm, point) in the order in which they are measured: arms A B, then B A, and so on.

    With all arms alive they alternate at every point; otherwise an arm does all its points before the next
    one is started.
    """
    for number in range(rounds):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        if keep:
            yield from ((number, arm, point) for point in points for arm in order)
        else:
            yield from ((number, arm, point) for arm in order for point in points)


def check_room(name: str, plan: LaunchPlan, sequences: int, tokens: int) -> None:
    """Refuse an arm that cannot hold ``sequences`` of ``tokens`` tokens at once on each replica.

    Raises:
        Refusal: naming the arm and what bounds it.
    """
    if plan.max_running_requests < sequences:
        raise Refusal(
            option=f"arm {name}: --max-running-requests",
            given=plan.max_running_requests,
            rule=f"the largest batch needs {sequences} requests at once on each of "
            f"{plan.attn_dp_size} attention replicas",
            alternatives=(f"--max-running-requests {sequences}", "a smaller --batch"),
        )
    pages = sequences * -(-tokens // plan.page_size)
    if 0 < plan.full_pages < pages:
        raise Refusal(
            option=f"arm {name}: --kv-memory",
            given=f"{plan.full_pages} pages of {plan.page_size} tokens",
            rule=f"{sequences} sequences of {tokens} tokens need {pages} pages on each replica",
            alternatives=("a larger --kv-memory", "a smaller --batch or --context"),
        )
