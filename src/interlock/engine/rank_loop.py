"""The loop of a rank: agree on the step, run it, tell what it made.

The leader of a replica (attention-TP rank 0) owns its scheduler. Each turn it reads requests, agrees with
the leaders of the other replicas on the phase, and sends the step to the followers of its own replica.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
import torch
import zmq

from interlock.engine.batch import Batch, decode_arrays, encode_arrays
from interlock.engine.disaggregation.role import AggregatedRole, Role
from interlock.engine.execution import StepExecutor
from interlock.engine.grammar import GrammarGate
from interlock.engine.heartbeat import Activity
from interlock.engine.launched import Launched
from interlock.engine.messages import (
    AbortRequest,
    AddRequest,
    AddRequests,
    EngineOutputs,
    FlushCache,
    RecordSteps,
    Shutdown,
    StepRecord,
    ToEngine,
    TokenDelta,
    Wake,
)
from interlock.engine.model_runner import ModelRunner
from interlock.engine.scheduler import Scheduler
from interlock.engine.turns import Wanted, agree
from interlock.moe.terms import Phase
from interlock.parallel.group import Group

IDLE_POLL_MS = 500
HELD_POLL_MS = 2
PEER_POLL_MS = 20
"""While idle, where another server may give one replica work that the others do not hear of."""
FIRST_FRAME_BYTES = 8192
_LENGTH = struct.Struct("<q")
_STOP, _TICK = -1, -2


class Turn(Enum):
    """What a follower gets when it gets no step."""

    EMPTY = auto()
    STOP = auto()


class StepChannel:
    """The step of the leader, broadcast to the followers of its replica as bytes.

    One broadcast of a fixed frame carries the length and small steps; larger ones need a second.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._frame = torch.zeros(FIRST_FRAME_BYTES, dtype=torch.uint8)

    def send(self, payload: bytes | None, *, stop: bool = False) -> None:
        """Send a step, ``None`` for a turn without a step, or the order to stop."""
        if self._group.size == 1:
            return
        body = payload or b""
        length = _STOP if stop else _TICK if payload is None else len(body)
        head = _LENGTH.pack(length) + body[: FIRST_FRAME_BYTES - _LENGTH.size]
        self._frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._group.broadcast(self._frame)
        rest = body[FIRST_FRAME_BYTES - _LENGTH.size :]
        if rest:
            self._group.broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def receive(self) -> bytes | Turn:
        """The leader's next step, or a turn without one, or the order to stop."""
        frame = self._group.broadcast(self._frame).numpy().tobytes()
        (length,) = _LENGTH.unpack_from(frame)
        if length == _STOP:
            return Turn.STOP
        if length == _TICK:
            return Turn.EMPTY
        body = frame[_LENGTH.size : _LENGTH.size + length]
        missing = length - len(body)
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8)
            body += self._group.broadcast(rest).numpy().tobytes()
        return body


class FollowerLoop:
    """Runs the steps of its replica's leader."""

    def __init__(self, runner: ModelRunner, channel: StepChannel, activity: Activity) -> None:
        self._runner = runner
        self._channel = channel
        self._activity = activity

    def run(self) -> None:
        while True:
            self._activity.enter("waiting for ranks")
            message = self._channel.receive()
            if message is Turn.STOP:
                return
            self._activity.next_iteration()
            if isinstance(message, bytes):
                self._activity.enter("computing")
                self._runner.context.moe.check()
                self._runner.follow(decode_arrays(message))


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the leaders of all replicas agreed on for one turn."""

    phase: Phase | None
    stop: bool


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and not yet taken in."""

    batch: Batch
    step: Launched
    turn: int


class LeaderLoop:
    """Schedules, runs and reports the steps of one replica.

    Attributes:
        overlaps: a step is launched before the one ahead of it is taken in.
    """

    def __init__(
        self,
        runner: ModelRunner,
        channel: StepChannel,
        activity: Activity,
        inputs: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        replicas: Group,
        scheduler: Scheduler,
        gate: GrammarGate,
        role: Role,
    ) -> None:
        self._runner = runner
        self._channel = channel
        self._activity = activity
        self._inputs = inputs
        self._outputs = outputs
        self._replicas = replicas
        self._scheduler = scheduler
        self._gate = gate
        self._role = role
        is_alone = isinstance(role, AggregatedRole) or replicas.size == 1
        self._idle_poll_ms = IDLE_POLL_MS if is_alone else PEER_POLL_MS
        self._executor = StepExecutor(runner)
        self.overlaps = runner.plan.overlap_schedule
        self._in_flight: _Flight | None = None
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._early: list[TokenDelta] = []
        self._stop = False
        self._last_phase: Phase | None = None
        self._records_steps = False
        self._turn = 0
        self._turn_begun = 0.0

    def run(self) -> None:
        while True:
            self._read_inputs()
            if self._in_flight is not None:
                self._go_on(self._in_flight)
                continue
            self._activity.enter("waiting for ranks")
            agreement = self._agree()
            self._turn += 1
            self._activity.next_iteration()
            if agreement.stop:
                self._channel.send(None, stop=True)
                return
            self._last_phase = agreement.phase
            if agreement.phase is None:
                self._channel.send(None)
                self._report(self._early)
                self._early = []
                continue
            self._step(agreement.phase)

    def _step(self, phase: Phase) -> None:
        self._activity.enter("computing")
        batch = self._scheduler.schedule(phase) or self._scheduler.idle_step(phase)
        if self._channel_is_shared:
            self._channel.send(encode_arrays(batch.arrays))
        flight = _Flight(batch, self._executor.launch(batch), self._turn)
        if self.overlaps:
            self._in_flight = flight
        else:
            self._land(flight)

    def _go_on(self, flight: _Flight) -> None:
        """Launch the step after the one in flight where it need not wait for it, then take in that one."""
        self._activity.enter("computing")
        ahead = None if self._stop else self._scheduler.schedule_ahead()
        self._in_flight = None
        if ahead is not None:
            self._turn += 1
            self._activity.next_iteration()
            self._in_flight = _Flight(ahead, self._executor.launch(ahead, flight.step), self._turn)
        self._land(flight)

    def _land(self, flight: _Flight) -> None:
        sampled = flight.step.result()
        self._runner.context.moe.check()
        deltas = self._role.collect(self._scheduler.commit(flight.batch, sampled))
        self._report(self._early + deltas, self._record(flight) if self._records_steps else None)
        self._early = []
        self._turn_begun = time.monotonic()

    @property
    def _channel_is_shared(self) -> bool:
        return self._runner.groups.attn_tp.size > 1

    def _agree(self) -> Agreement:
        wanted = self._scheduler.wanted()
        if self._replicas.size == 1:
            return Agreement(phase=wanted.phase, stop=self._stop)
        mine = torch.tensor([wanted.prefill_tokens, wanted.decode_tokens, self._stop], dtype=torch.int64)
        everyone = self._replicas.all_gather(mine).view(self._replicas.size, 3).tolist()
        wishes = [Wanted(None, prefill, decode) for prefill, decode, _ in everyone]
        return Agreement(phase=agree(wishes, self._last_phase), stop=any(stop for *_, stop in everyone))

    def _record(self, flight: _Flight) -> StepRecord:
        batch = flight.batch
        return StepRecord(
            turn=flight.turn,
            phase=batch.phase.value,
            tokens=batch.arrays.live_tokens,
            sequences=len(batch.arrays.kv_len),
            kv_tokens=int(batch.arrays.kv_len.sum()),
            begun=self._turn_begun,
            ended=time.monotonic(),
        )

    def _report(self, deltas: list[TokenDelta], step: StepRecord | None = None) -> None:
        stats = self._scheduler.stats()
        if len(self._gate):
            stats = msgspec.structs.replace(stats, waiting=stats.waiting + len(self._gate))
        if (transfer := self._role.stats()) is not None:
            stats = msgspec.structs.replace(stats, transfer=transfer)
        outputs = EngineOutputs(replica=self._replicas.rank, deltas=tuple(deltas), stats=stats, step=step)
        self._outputs.send(self._encoder.encode(outputs), copy=False)

    def _read_inputs(self) -> None:
        every_replica_was_idle = self._last_phase is None
        if every_replica_was_idle and not self._scheduler.has_work and not self._early:
            self._activity.enter("idle")
            self._inputs.poll(HELD_POLL_MS if len(self._gate) else self._idle_poll_ms)
            self._turn_begun = time.monotonic()
        self._release_held()
        while True:
            try:
                message = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(self._decoder.decode(message))
        self._early += self._role.turn()

    def _release_held(self) -> None:
        """Queue the requests whose grammars are compiled by now."""
        for message, grammar in self._gate.released():
            if isinstance(grammar, str):
                name = message.request_id
                self._early.append(
                    TokenDelta(request_id=name, finish_reason="error", error=grammar, refused=True)
                )
            else:
                self._early += self._role.add(message, grammar)

    def _add(self, message: AddRequest) -> None:
        grammar = None
        if message.grammar is not None:
            grammar = self._gate.take(message)
            if grammar is None:
                return
        self._early += self._role.add(message, grammar)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AddRequests():
                for request in message.requests:
                    self._add(request)
            case AbortRequest():
                name = message.request_id
                if self._gate.drop(name):
                    self._early.append(TokenDelta(request_id=name, finish_reason="abort"))
                else:
                    told = self._role.abort(name)
                    self._early += self._scheduler.abort(name) if told is None else told
            case FlushCache():
                self._scheduler.flush_cache()
            case Shutdown():
                self._stop = True
            case RecordSteps():
                self._records_steps = message.on
            case Wake():
                return
