"""What both halves of the protocol share: deadlines, what clients are told, and how a half is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from interlock.engine.messages import AddRequest, TokenDelta, TransferStats
from interlock.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: ``peer`` for what the other server does at once, ``queue`` for whatever waits for its turn."""

    peer: float
    queue: float


@dataclass(slots=True)
class Traffic:
    """What a link saw. ``copies``, ``nbytes``, ``seconds`` and ``failures`` are summed over the ranks of a
    prefill replica and only grow; a decode server is written to and sees none of it.

    ``peers``: servers that it is connected to now.
    """

    peers: int = 0
    copies: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class Entry(Protocol):
    """One key of a half. ``state`` is of the half's own ``State``; ``deadline`` of its clock."""

    state: Any
    deadline: float


E = TypeVar("E", bound=Entry)


class Half(Generic[E]):
    """The common part of ``PrefillRole`` and ``DecodeRole``.

    Args:
        seconds: how long a request may stay in each state.
        now: a monotonic clock.
    """

    role = ""

    def __init__(self, scheduler: Scheduler, seconds: Mapping[Any, float], now: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._seconds = seconds
        self._now = now
        self._by_request: dict[str, E] = {}
        self._told: list[TokenDelta] = []
        self._handed_over = self._failed = self._tokens = 0

    def _enter(self, entry: E, state: Enum) -> None:
        entry.state, entry.deadline = state, self._now() + self._seconds[state]

    def _overdue(self, entries: Iterable[E]) -> list[E]:
        now = self._now()
        return [each for each in entries if each.deadline <= now]

    def _waited(self, entry: E) -> str:
        """What is said of an entry whose time is up."""
        return f"{self.role} server: waited {self._seconds[entry.state]:g} s for {entry.state.value}"

    def _tell(self, message: AddRequest, error: str, *, refused: bool = False) -> None:
        """Tell the client that its request failed, once."""
        if self._by_request.pop(message.request_id, None) is not None:
            self._told.append(failed(message, error, refused=refused))
            self._failed += 1

    def _take_told(self) -> list[TokenDelta]:
        told, self._told = self._told, []
        return told

    def _stats(self, entries: Collection[E], traffic: Traffic, **more: Any) -> TransferStats:
        return TransferStats(
            role=self.role,
            states=dict(Counter(entry.state.name.lower() for entry in entries)),
            peers=traffic.peers,
            tokens_total=self._tokens,
            handed_over_total=self._handed_over,
            failed_total=self._failed,
            copies_total=traffic.copies,
            bytes_total=traffic.nbytes,
            seconds_total=traffic.seconds,
            copy_failures_total=traffic.failures,
            **more,
        )


def plain(message: AddRequest, reason: str) -> TokenDelta:
    """The last delta of a request that ends for ``reason`` without tokens."""
    return TokenDelta(
        request_id=message.request_id, finish_reason=reason, prompt_tokens=len(message.token_ids)
    )


def failed(message: AddRequest, error: str, *, refused: bool = False) -> TokenDelta:
    """The last delta of a request that failed: by its own fault if ``refused``, else the other server's."""
    return msgspec.structs.replace(
        plain(message, "error"), error=error, refused=refused, peer_failed=not refused
    )
