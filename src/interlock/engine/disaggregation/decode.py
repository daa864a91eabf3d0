"""The decode half: reserves pages, lets the prefill server fill them, goes on from the first token.

    MEETING      the prefill server has been asked for the request      -> WAITING, or timeout
    WAITING      for a slot and pages                                   -> RECEIVING, or queue_timeout
    RECEIVING    the prefill server computes and writes                 -> over, or queue_timeout + timeout
    FINISHING    the prompt is computed, the last pages are coming      -> over, or twice the timeout
    DRAINING     nobody wants it any more, but pages may be written to  -> over when they are not
    QUARANTINED  the connection is gone; a writer may not know it yet   -> over after a while

Pages are given back only when nobody can write to them: after the prefill server's last message of the key
(``HandOver`` or ``Ended``), or some time after the connection was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from interlock.engine.disaggregation.half import Deadlines, Half, Traffic, failed, plain
from interlock.engine.disaggregation.wire import (
    Cancel,
    Ended,
    HandOver,
    Join,
    Key,
    Matched,
    Message,
    Reserve,
    Sending,
    digest,
    key_of,
)
from interlock.engine.messages import AddRequest, Meeting, TokenDelta, TransferStats
from interlock.engine.reception import Arrival
from interlock.engine.request import Request
from interlock.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from interlock.engine.grammar import GrammarState


class State(Enum):
    """See the module. The value is what a timeout says was waited for."""

    MEETING = "the prefill server to have the request"
    WAITING = "free pages of the key-value cache"
    RECEIVING = "the prefill server to compute the prompt"
    FINISHING = "the last pages from the prefill server"
    DRAINING = "the prefill server to stop writing"
    QUARANTINED = "writers to notice a lost connection"


RESERVED = frozenset({State.RECEIVING, State.FINISHING})
HELD = RESERVED | {State.DRAINING, State.QUARANTINED}


class PeerService(Protocol):
    """What the decode half needs of its connections to prefill servers."""

    traffic: Traffic

    def reach(self, meeting: Meeting) -> int:
        """The connection to the prefill replica of this room, which may still be under way. ``heard`` and
        ``lost`` are called for it."""

    def send(self, peer: int, message: Message) -> None:
        """Say something once connected; lost when the connection is."""

    def drop(self, peer: int) -> None:
        """Cut a connection; ``lost`` is called for it."""


@dataclass(slots=True)
class _Intake:
    """One key. ``expected``: the request before it holds pages, ``request``: while it does; ``held``: tokens
    of the prompt that need not come."""

    key: Key
    message: AddRequest
    expected: Request
    peer: int
    state: State
    deadline: float
    request: Request | None = None
    held: int = 0


class DecodeRole(Half[_Intake]):
    """The decode half of every request of one scheduler, until its first token. One thread.

    Args:
        quarantine: seconds after a lost connection for which its pages are not used again.
        now: a monotonic clock.
    """

    role = "decode"

    def __init__(
        self,
        scheduler: Scheduler,
        service: PeerService,
        deadlines: Deadlines,
        *,
        quarantine: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        peer, queue = deadlines.peer, deadlines.queue
        seconds = {
            State.MEETING: peer,
            State.WAITING: queue,
            State.RECEIVING: queue + peer,
            State.FINISHING: 2 * peer,
            State.DRAINING: peer,
            State.QUARANTINED: quarantine,
        }
        super().__init__(scheduler, seconds, now)
        self._service = service
        self._intakes: dict[tuple[int, Key], _Intake] = {}

    def __len__(self) -> int:
        return len(self._intakes)

    # ---- the front end

    def add(self, message: AddRequest, grammar: GrammarState | None = None) -> list[TokenDelta]:
        """Take a request; whatever there is to say of it is returned by later calls of ``turn``."""
        if message.meeting is None:
            text = (
                "this is a decode server: a request needs bootstrap_host, bootstrap_port and bootstrap_room"
            )
            return [failed(message, text, refused=True)]
        refused = self._scheduler.refusal(message)
        if refused is not None:
            return [refused]
        key = key_of(message)
        peer = self._service.reach(message.meeting)
        if (peer, key) in self._intakes or message.request_id in self._by_request:
            return [failed(message, f"room {key[0]} is already in use; rooms must be unique", refused=True)]
        expected = self._scheduler.expect(message, grammar)
        intake = _Intake(
            key, message, expected, peer, State.MEETING, self._now() + self._seconds[State.MEETING]
        )
        self._intakes[peer, key] = self._by_request[message.request_id] = intake
        self._service.send(peer, Join(key=key, digest=digest(message)))
        return self._take_told()

    def abort(self, request_id: str) -> list[TokenDelta] | None:
        """The client is gone; None when the request is not known here (any more)."""
        intake = self._by_request.get(request_id)
        if intake is None:
            return None
        self._end(intake, None)
        return [*self._take_told(), plain(intake.message, "abort")]

    def collect(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        return deltas

    def turn(self) -> list[TokenDelta]:
        """Let deadlines pass and give pages to those who wait; deltas for the front end."""
        for intake in self._overdue(self._intakes.values()):
            if intake.state is State.QUARANTINED:
                self._forget(intake)
            elif intake.state is State.DRAINING:
                self._enter(intake, State.DRAINING)
                self._service.drop(intake.peer)
            else:
                self._end(intake, self._waited(intake))
        for intake in list(self._intakes.values()):
            if intake.state is State.WAITING and not self._reserve(intake):
                break
        return self._take_told()

    def stats(self) -> TransferStats:
        """Counts of now."""
        table = self._scheduler.table
        pages = [
            (each.state, table.held(each.request.slot))
            for each in self._intakes.values()
            if each.request is not None
        ]
        return self._stats(
            self._intakes.values(),
            self._service.traffic,
            pages_held=sum(count for _, count in pages),
            pages_quarantined=sum(count for state, count in pages if state not in RESERVED),
        )

    # ---- the prefill server

    def heard(self, peer: int, message: Message) -> None:
        """A message of the prefill server ``peer``."""
        match message:
            case Matched(key=key) | Sending(key=key) | HandOver(key=key) | Ended(key=key):
                intake = self._intakes.get((peer, key))
                if intake is not None:
                    self._heard_of(intake, message)

    def lost(self, peer: int, reason: str) -> None:
        """The connection ``peer`` could not be made, or is gone."""
        for intake in [each for (number, _), each in self._intakes.items() if number == peer]:
            if intake.state in RESERVED:
                self._tell(intake.message, reason)
            if intake.state in HELD:
                self._enter(intake, State.QUARANTINED)
                if not self._seconds[State.QUARANTINED]:
                    self._forget(intake)
            else:
                self._tell(intake.message, reason)
                self._forget(intake)

    # ---- transitions

    def _heard_of(self, intake: _Intake, message: Message) -> None:
        match message:
            case Matched() if intake.state is State.MEETING:
                self._enter(intake, State.WAITING)
            case Sending() if intake.state is State.RECEIVING:
                self._enter(intake, State.FINISHING)
            case HandOver() if intake.state in RESERVED:
                self._take_over(intake, message)
            case Ended():
                self._tell(intake.message, message.error, refused=message.refused)
                self._forget(intake)
            case HandOver():
                self._tell(intake.message, "the prefill server handed over what it was not asked for")
                self._forget(intake)

    def _reserve(self, intake: _Intake) -> bool:
        """Give it a slot and pages if there are any."""
        request = intake.expected
        if not self._scheduler.reserve(request):
            return False
        intake.request = request
        table, geometry, slot = self._scheduler.table, self._scheduler.geometry, request.slot
        pages = int(table.pages[slot])
        intake.held = len(request.path) * geometry.page_size
        self._enter(intake, State.RECEIVING)
        self._service.send(
            intake.peer,
            Reserve(
                key=intake.key,
                held=intake.held,
                window_start=geometry.first_visible(request.prompt_len) * geometry.page_size,
                full=() if table.full is None else tuple(table.full[slot, :pages].tolist()),
                window=() if table.window is None else tuple(table.window[slot, :pages].tolist()),
            ),
        )
        return True

    def _take_over(self, intake: _Intake, message: HandOver) -> None:
        request = intake.request
        assert request is not None
        wanted = request.params.max_tokens > 0
        if message.tokens != request.prompt_len or (message.token is not None) != wanted:
            text = f"{message.tokens} of {request.prompt_len} tokens arrived"
            self._tell(intake.message, f"transfer: {text}, or not with the first token that was asked for")
            self._forget(intake)
            return
        intake.request = None
        self._forget(intake)
        self._handed_over += 1
        self._tokens += request.prompt_len - intake.held
        arrival = Arrival(
            token=message.token,
            logprob=message.logprob,
            prompt_logprobs=message.prompt_logprobs,
            seed=message.seed,
            cached_tokens=message.cached_tokens,
        )
        self._told += self._scheduler.arrive(request, arrival)

    def _end(self, intake: _Intake, error: str | None) -> None:
        """It is over for the client; ``error`` is what it is told, None for nothing."""
        if error is not None:
            self._tell(intake.message, error)
        self._by_request.pop(intake.message.request_id, None)
        self._service.send(intake.peer, Cancel(key=intake.key))
        if intake.state in RESERVED:
            self._enter(intake, State.DRAINING)
        else:
            self._forget(intake)

    def _forget(self, intake: _Intake) -> None:
        """Drop it; nobody writes to its pages any more."""
        self._intakes.pop((intake.peer, intake.key), None)
        self._by_request.pop(intake.message.request_id, None)
        if intake.request is not None:
            self._scheduler.give_up(intake.request)
            intake.request = None
