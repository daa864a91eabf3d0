"""A prefill and a decode scheduler in one process, with a network and a transport that tests disturb.

Both run the fake model of ``simulation``, which checks every key that it reads, so a page that was not
written, or was given to somebody else, is seen at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interlock.engine.disaggregation.decode import DecodeRole
from interlock.engine.disaggregation.half import Deadlines, Traffic
from interlock.engine.disaggregation.prefill import PrefillRole
from interlock.engine.disaggregation.wire import Copy, Message, pack, unpack
from interlock.engine.messages import AddRequest, Meeting, SamplingParams
from tests.engine.simulation import Simulation, Stream, check_pages, sim_plan

DEADLINES = Deadlines(peer=5.0, queue=50.0)
STEP_SECONDS = 0.05


@dataclass
class Network:
    """Messages and copies on their way. ``lose``: which messages never arrive."""

    to_prefill: deque[tuple[int, Message]] = field(default_factory=deque)
    to_decode: deque[tuple[int, Message]] = field(default_factory=deque)
    copies: deque[Copy] = field(default_factory=deque)
    connection: int = 1
    connected: bool = True
    lose: Callable[[Message], bool] = lambda message: False
    errors: Callable[[Copy], str] = lambda copy: ""
    stalled: bool = False
    sent_tokens: int = 0


class _Prefill:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.traffic = Traffic()

    def send(self, peer: int, message: Message) -> None:
        if self._network.connected and peer == self._network.connection and not self._network.lose(message):
            self._network.to_decode.append((peer, unpack(pack(message)[4:])))

    def copy(self, message: Copy) -> None:
        self._network.copies.append(message)


class _Decode:
    def __init__(self, network: Network) -> None:
        self._network = network
        self.traffic = Traffic()
        self.dropped: list[int] = []

    def reach(self, meeting: Meeting) -> int:
        if not self._network.connected:
            self._network.connection += 1
            self._network.connected = True
        return self._network.connection

    def send(self, peer: int, message: Message) -> None:
        if self._network.connected and peer == self._network.connection and not self._network.lose(message):
            self._network.to_prefill.append((peer, unpack(pack(message)[4:])))

    def drop(self, peer: int) -> None:
        self.dropped.append(peer)


class Pair:
    """Two simulations and the halves of the protocol."""

    def __init__(
        self,
        windows: Sequence[int | None] = (None, 6),
        *,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        seed: int = 0,
        deadlines: Deadlines = DEADLINES,
        quarantine: float = 1.0,
    ) -> None:
        self.time = 0.0
        self._windows = windows
        self._prefill_changes = prefill or {}
        self._deadlines = deadlines
        self.random = random.Random(seed)
        self.network = Network()
        self.prefill = Simulation(sim_plan(windows, **self._prefill_changes))
        self.decode = Simulation(sim_plan(windows, **(decode or {})))
        self.p = PrefillRole(self.prefill.scheduler, _Prefill(self.network), deadlines, now=lambda: self.time)
        self._peers = _Decode(self.network)
        self.d = DecodeRole(
            self.decode.scheduler,
            self._peers,
            deadlines,
            quarantine=quarantine,
            now=lambda: self.time,
        )
        self._rooms = 0

    def restart_prefill(self) -> None:
        """The prefill server is killed, with all that it was doing, and another one is there."""
        peer = self.network.connection
        self.network.connected = False
        for queue in (self.network.to_decode, self.network.to_prefill, self.network.copies):
            queue.clear()
        old = self.prefill.streams
        self.prefill = Simulation(sim_plan(self._windows, **self._prefill_changes))
        self.prefill.streams = {
            name: Stream(stream.message, finish=stream.finish or "killed") for name, stream in old.items()
        }
        self.p = PrefillRole(
            self.prefill.scheduler, _Prefill(self.network), self._deadlines, now=lambda: self.time
        )
        self.d.lost(peer, "the connection to the prefill server is lost")

    # ---- requests

    def message(self, prompt: Sequence[int], **params: Any) -> AddRequest:
        self._rooms += 1
        return AddRequest(
            request_id=f"r{self._rooms}",
            token_ids=tuple(prompt),
            sampling=SamplingParams(**({"temperature": 0.0} | params)),
            meeting=Meeting(host="p", port=1, room=self._rooms),
        )

    def add(self, prompt: Sequence[int], **params: Any) -> str:
        """The same request to both, in either order."""
        message = self.message(prompt, **params)
        halves = [self.to_prefill, self.to_decode]
        self.random.shuffle(halves)
        for half in halves:
            half(message)
        return message.request_id

    def to_prefill(self, message: AddRequest) -> None:
        self._expect(self.prefill, message)
        self.prefill.receive(self.p.add(message))

    def to_decode(self, message: AddRequest) -> None:
        self._expect(self.decode, message)
        self.decode.receive(self.d.add(message))

    def _expect(self, simulation: Simulation, message: AddRequest) -> None:
        simulation.streams[message.request_id] = Stream(message)

    def abort_prefill(self, name: str) -> None:
        deltas = self.p.abort(name)
        self.prefill.receive(self.prefill.scheduler.abort(name) if deltas is None else deltas)

    def abort_decode(self, name: str) -> None:
        deltas = self.d.abort(name)
        self.decode.receive(self.decode.scheduler.abort(name) if deltas is None else deltas)

    # ---- time

    def cut(self) -> None:
        """The connection breaks: what is on its way is lost, both sides are told."""
        peer = self.network.connection
        self.network.connected = False
        self.network.to_decode.clear()
        self.network.to_prefill.clear()
        self.p.lost(peer)
        self.d.lost(peer, "the connection to the prefill server is lost")

    def move(self, copies: int = 1_000_000) -> None:
        """Do copies that are on their way."""
        while self.network.copies and copies and not self.network.stalled:
            copies -= 1
            copy = self.network.copies.popleft()
            error = self.network.errors(copy)
            if not error:
                self._write(copy)
            self.p.copied(copy.job, error)

    def _write(self, copy: Copy) -> None:
        self.network.sent_tokens += copy.end - copy.start
        for name, source, target, start in (
            ("full", copy.source_full, copy.target_full, copy.start),
            ("windowed", copy.source_window, copy.target_window, copy.window_start),
        ):
            if not source or start >= copy.end:
                continue
            tokens = np.arange(start, copy.end)
            sizes = self.prefill.model.page_size, self.decode.model.page_size
            pages = [np.array(p)[tokens // size] for p, size in zip((source, target), sizes, strict=True)]
            assert all((each >= 0).all() for each in pages), "a page is needed that is not held"
            mine, theirs = (each * size + tokens % size for each, size in zip(pages, sizes, strict=True))
            getattr(self.decode.model, name)[theirs] = getattr(self.prefill.model, name)[mine]

    def talk(self, messages: int = 1_000_000) -> None:
        """Deliver messages, some of either side first."""
        network = self.network
        while messages and (network.to_prefill or network.to_decode):
            messages -= 1
            queues = [queue for queue in (network.to_prefill, network.to_decode) if queue]
            queue = self.random.choice(queues)
            peer, message = queue.popleft()
            if queue is network.to_prefill:
                self.p.heard(peer, message)
            else:
                self.d.heard(peer, message)

    def tick(self) -> None:
        """One turn of both loops."""
        self.time += STEP_SECONDS
        self.prefill.receive(self.p.turn())
        self.decode.receive(self.d.turn())
        for peer in self._peers.dropped:
            if peer == self.network.connection and self.network.connected:
                self.cut()
        self._peers.dropped.clear()
        self._step(self.prefill, self.p.collect)
        self._step(self.decode, self.d.collect)

    def _step(self, simulation: Simulation, collect: Callable[[Any], Any]) -> None:
        scheduler = simulation.scheduler
        batch = scheduler.schedule()
        if batch is not None:
            simulation.receive(collect(scheduler.commit(batch, simulation.model.forward(batch))))
        check_pages(scheduler)

    def run(self, seconds: float = 200.0) -> None:
        """Until nothing is left, at most ``seconds`` of the simulation's time."""
        end = self.time + seconds
        while self.busy:
            assert self.time < end, "something hangs"
            self.talk(self.random.randint(0, 6))
            self.move(self.random.randint(0, 3))
            self.tick()
        self.tick()

    @property
    def busy(self) -> bool:
        return bool(
            len(self.p)
            or len(self.d)
            or self.prefill.scheduler.has_work
            or self.decode.scheduler.has_work
            or self.prefill.scheduler.departures
        )

    def verify_free(self) -> None:
        """Nothing but cached pages is left on either side."""
        for simulation in (self.prefill, self.decode):
            check_pages(simulation.scheduler)
            stats = simulation.scheduler.stats()
            assert stats.full_pages_free + stats.full_pages_cached == stats.full_pages
            assert stats.window_pages_free + stats.window_pages_cached == stats.window_pages
            assert simulation.scheduler.table.free_rows == simulation.scheduler.table.rows
