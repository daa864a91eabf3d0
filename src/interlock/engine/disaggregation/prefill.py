"""The prefill half: computes prompts and hands them over. A state machine; sockets and threads are elsewhere.

    MEETING      one half of the request is here                        -> MATCHED, or timeout
    MATCHED      the decode server waits for pages of its own           -> COMPUTING, or queue_timeout
    COMPUTING    in the scheduler; each chunk's pages leave at once     -> SENDING, or queue_timeout
    SENDING      the prompt is computed, the last pages are on their way -> over, or timeout
    FAILED       nobody wants it any more, but pages are being read      -> over when they are not

In every state an abort of the client, a cancel of the decode server or a lost connection leads to FAILED,
and from there, once nothing is read any more, to the one ``Ended`` message. ``HandOver`` and ``Ended`` are
the last message of a key, and each key gets exactly one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from interlock.engine.disaggregation.half import Deadlines, Half, Traffic, failed, plain
from interlock.engine.disaggregation.wire import (
    Cancel,
    Copy,
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
from interlock.engine.messages import AddRequest, TokenDelta, TransferStats
from interlock.engine.request import Request
from interlock.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from interlock.engine.grammar import GrammarState


class State(Enum):
    """See the module. The value is what a timeout says was waited for."""

    MEETING = "the other half of the request to come"
    MATCHED = "pages at the decode server"
    COMPUTING = "the prompt to be computed"
    SENDING = "the last pages to arrive at the decode server"
    FAILED = "pages to be read no more"


class CopyService(Protocol):
    """What the prefill half needs of its ranks and peers."""

    traffic: Traffic

    def send(self, peer: int, message: Message) -> None:
        """Say something to the decode server ``peer``; lost when it is gone."""

    def copy(self, message: Copy) -> None:
        """Let every rank of the replica copy; ``copied`` is called once for it."""


@dataclass(slots=True)
class _Job:
    """One key. ``request``: in the scheduler; ``copies``: not finished ones; ``result``: once computed, at
    ``computed`` of the clock."""

    key: Key
    state: State
    deadline: float
    message: AddRequest | None = None
    grammar: GrammarState | None = None
    peer: int | None = None
    digest: bytes = b""
    reserve: Reserve | None = None
    request: Request | None = None
    sent: int = 0
    copies: set[int] = field(default_factory=set)
    result: TokenDelta | None = None
    computed: float = 0.0
    error: str = ""
    refused: bool = False

    @property
    def has_met(self) -> bool:
        """Both halves have come; otherwise a failed job stays a while, to tell the one that is late."""
        return self.message is not None and bool(self.digest)


class PrefillRole(Half[_Job]):
    """The prefill half of every request of one scheduler. One thread; ``now`` is a monotonic clock."""

    role = "prefill"

    def __init__(
        self,
        scheduler: Scheduler,
        service: CopyService,
        deadlines: Deadlines,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        seconds = {
            State.MEETING: deadlines.peer,
            State.MATCHED: deadlines.queue,
            State.COMPUTING: deadlines.queue,
            State.SENDING: deadlines.peer,
            State.FAILED: deadlines.peer,
        }
        super().__init__(scheduler, seconds, now)
        self._service = service
        self._jobs: dict[Key, _Job] = {}
        self._by_copy: dict[int, _Job] = {}
        self._copies = 0
        self._exposed = 0.0
        scheduler.hands_over = True
        scheduler.on_chunk = self._on_chunk

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- the front end

    def add(self, message: AddRequest, grammar: GrammarState | None = None) -> list[TokenDelta]:
        """Take a request; whatever there is to say of it is returned by later calls of ``turn``."""
        if message.meeting is None:
            return [_refused(message, "this is a prefill server: a request needs bootstrap_host and _room")]
        key = key_of(message)
        job = self._jobs.get(key)
        if message.request_id in self._by_request or (job is not None and job.message is not None):
            return [_refused(message, f"room {key[0]} is already in use; rooms must be unique")]
        if job is None:
            job = self._meeting(key)
        job.message, job.grammar = message, grammar
        if job.state is State.FAILED:
            self._forget(job)
            return [failed(message, job.error, refused=job.refused)]
        self._by_request[message.request_id] = job
        refused = self._scheduler.refusal(message)
        if refused is not None:
            self._fail(job, refused.error or "", refused=refused.refused)
        elif job.peer is not None:
            self._meet(job)
        return self._take_told()

    def abort(self, request_id: str) -> list[TokenDelta] | None:
        """The client is gone; None when the request is not known here."""
        job = self._by_request.get(request_id)
        if job is None:
            return None
        assert job.message is not None
        self._by_request.pop(request_id)
        self._fail(job, "the request was aborted at the prefill server")
        return [*self._take_told(), plain(job.message, "abort")]

    def collect(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Keep back what the scheduler says of requests that are not handed over yet."""
        passed = []
        for each in deltas:
            job = self._by_request.get(each.request_id)
            if job is None or job.state is not State.COMPUTING:
                passed.append(each)
            elif each.finish_reason == "error":
                self._fail(job, each.error or "", refused=each.refused)
            else:
                job.result = each
                job.computed = self._now()
                self._enter(job, State.SENDING)
                self._say(job, Sending(key=job.key))
                self._finish_if_quiet(job)
        return passed + self._take_told()

    def turn(self) -> list[TokenDelta]:
        """Let deadlines pass; deltas for the front end."""
        for job in self._overdue(self._jobs.values()):
            if job.state is not State.FAILED:
                self._fail(job, self._waited(job))
            elif job.copies:
                self._enter(job, State.FAILED)
            else:
                self._forget(job)
        return self._take_told()

    def stats(self) -> TransferStats:
        """Counts of now; ``copies_pending`` are still read from."""
        table, reading = self._scheduler.table, [job for job in self._jobs.values() if job.copies]
        pages = {job.key: table.held(job.request.slot) for job in reading if job.request is not None}
        over = (pages.get(job.key, 0) for job in reading if job.state is State.FAILED)
        return self._stats(
            self._jobs.values(),
            self._service.traffic,
            pages_held=sum(pages.values()),
            pages_quarantined=sum(over),
            copies_pending=len(self._by_copy),
            exposed_seconds_total=self._exposed,
        )

    # ---- the decode server

    def heard(self, peer: int, message: Message) -> None:
        """A message of the decode server ``peer``."""
        match message:
            case Join(key=key):
                self._join(peer, message)
            case Reserve(key=key):
                job = self._jobs.get(key)
                if job is not None and job.peer == peer and job.state is State.MATCHED:
                    self._compute(job, message)
            case Cancel(key=key):
                job = self._jobs.get(key)
                if job is None or job.peer != peer:
                    self._service.send(peer, Ended(key=key, error="cancelled"))
                elif job.state is not State.FAILED:
                    self._fail(job, "the decode server gave the request up")

    def lost(self, peer: int) -> None:
        """The connection to the decode server ``peer`` is gone."""
        for job in [job for job in self._jobs.values() if job.peer == peer]:
            job.peer = None
            if job.state is not State.FAILED:
                self._fail(job, "the connection to the decode server is lost")

    def copied(self, number: int, error: str) -> None:
        """Every rank is done with a copy. ``error``: why not everything arrived, or ""."""
        job = self._by_copy.pop(number, None)
        if job is None:
            return
        job.copies.discard(number)
        if job.request is not None:
            self._scheduler.release_hold(job.request)
        if error and job.state is not State.FAILED:
            self._fail(job, f"transfer: {error}")
        else:
            self._finish_if_quiet(job)

    # ---- transitions

    def _join(self, peer: int, message: Join) -> None:
        job = self._jobs.get(message.key)
        if job is not None and job.peer is not None:
            if job.peer != peer:
                self._service.send(peer, Ended(key=message.key, error="the room is in use", refused=True))
            return
        if job is None:
            job = self._meeting(message.key)
        job.peer, job.digest = peer, message.digest
        if job.state is State.FAILED:
            self._finish_if_quiet(job)
        elif job.message is not None:
            self._meet(job)

    def _meeting(self, key: Key) -> _Job:
        """A new job of which one half has come."""
        job = self._jobs[key] = _Job(key, State.MEETING, self._now() + self._seconds[State.MEETING])
        return job

    def _meet(self, job: _Job) -> None:
        assert job.message is not None
        if job.digest != digest(job.message):
            self._fail(job, "the two servers were asked different things in one room", refused=True)
            return
        self._enter(job, State.MATCHED)
        self._say(job, Matched(key=job.key))

    def _compute(self, job: _Job, reserve: Reserve) -> None:
        assert job.message is not None
        length, geometry = len(job.message.token_ids), self._scheduler.geometry
        earliest = geometry.first_visible(length) * geometry.page_size
        if not (0 <= reserve.held <= length and earliest <= reserve.window_start <= length):
            self._fail(
                job,
                f"the decode server asks for tokens from {reserve.held} and, in sliding-window "
                f"layers, {reserve.window_start} of a prompt of {length}",
            )
            return
        job.reserve, job.sent = reserve, reserve.held
        self._enter(job, State.COMPUTING)
        refused = self._scheduler.add(job.message, grammar=job.grammar)
        if refused:
            self._fail(job, refused[0].error or "", refused=refused[0].refused)

    def _on_chunk(self, request: Request, end: int) -> None:
        """Tokens up to ``end`` are in the cache: send those that the decode server lacks."""
        job = self._by_request.get(request.id)
        if job is None or job.reserve is None or job.state is not State.COMPUTING:
            return
        job.request = request
        end = min(end, request.prompt_len)
        if end <= job.sent:
            return
        table, slot = self._scheduler.table, request.slot
        pages = int(table.pages[slot])
        self._copies += 1
        copy = Copy(
            job=self._copies,
            target=job.peer if job.peer is not None else -1,
            start=job.sent,
            end=end,
            window_start=max(job.sent, job.reserve.window_start),
            source_full=() if table.full is None else tuple(table.full[slot, :pages].tolist()),
            source_window=() if table.window is None else tuple(table.window[slot, :pages].tolist()),
            target_full=job.reserve.full,
            target_window=job.reserve.window,
        )
        self._tokens += end - job.sent
        job.sent = end
        job.copies.add(copy.job)
        self._by_copy[copy.job] = job
        request.holds += 1
        self._service.copy(copy)

    def _finish_if_quiet(self, job: _Job) -> None:
        if job.copies:
            return
        if job.state is State.SENDING:
            assert job.result is not None
            assert job.message is not None
            self._say(job, self._hand_over(job, job.result))
            self._told.append(msgspec.structs.replace(job.result, finish_reason="length", stop_token_id=None))
            self._handed_over += 1
            self._exposed += self._now() - job.computed
            self._forget(job)
        elif job.state is State.FAILED:
            self._say(job, Ended(key=job.key, error=job.error, refused=job.refused))
            job.peer = None
            if job.has_met:
                self._forget(job)

    def _hand_over(self, job: _Job, result: TokenDelta) -> HandOver:
        assert job.message is not None
        assert job.request is not None
        return HandOver(
            key=job.key,
            tokens=len(job.message.token_ids),
            token=result.token_ids[0] if result.token_ids else None,
            logprob=result.logprobs[0] if result.logprobs else None,
            prompt_logprobs=result.prompt_logprobs,
            seed=job.request.seed,
            cached_tokens=result.cached_tokens,
        )

    def _fail(self, job: _Job, error: str, *, refused: bool = False) -> None:
        """End it here; the decode server hears of it once nothing is read any more."""
        was = job.state
        job.error, job.refused = error, refused
        self._enter(job, State.FAILED)
        if job.message is not None:
            self._tell(job.message, error, refused=refused)
            if was is State.COMPUTING:
                self._scheduler.abort(job.message.request_id)
        self._finish_if_quiet(job)

    def _say(self, job: _Job, message: Message) -> None:
        if job.peer is not None:
            self._service.send(job.peer, message)

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.key, None)
        if job.message is not None:
            self._by_request.pop(job.message.request_id, None)


def _refused(message: AddRequest, error: str) -> TokenDelta:
    return failed(message, error, refused=True)
