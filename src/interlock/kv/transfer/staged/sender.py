"""The prefill side of a staged transfer: gathers a slot while those before are fetched and scattered."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from interlock.kv.transfer.base import Pieces, TransferError
from interlock.kv.transfer.staged.carrier import SourceCarrier
from interlock.kv.transfer.staged.channel import Answer, Channel, Closed, Greeting, Part, Where
from interlock.kv.transfer.staged.mover import Blocks, Mover, mover
from interlock.kv.transfer.staged.parts import parts
from interlock.kv.transfer.staged.pinned import pin, unpin

LANES = 2
"""Connections to one receiver, each with a thread there: one fetches while the other turns around."""

LANE_SLOTS = 2
SLOTS = LANES * LANE_SLOTS
SLOT_BYTES = 8 << 20
GRAIN_BYTES = 1 << 20


@dataclass(slots=True)
class _Target:
    """One receiver. ``channels``: none or one a lane; ``is_cut``: nothing more is begun."""

    where: Where
    channels: tuple[Channel, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class _Lane:
    """A connection, parts on it that are not answered yet, in the order of their answers, and free slots."""

    channel: Channel
    sent: deque[tuple[int, Part]]
    free: list[int]


class StagedSender:
    """``KVSender``; see ``base``.

    Args:
        timeout: seconds of silence after which a receiver counts as gone.
    """

    def __init__(self, carrier: SourceCarrier, *, timeout: float, slot_bytes: int = SLOT_BYTES) -> None:
        self._carrier = carrier
        self._timeout = timeout
        self._slot_bytes = slot_bytes
        self._sizes: list[int] = []
        self._mover: Mover | None = None
        self._slots: list[torch.Tensor] = []
        self._pinned: torch.Tensor | None = None
        self._targets: dict[int, _Target] = {}
        self._next = 0

    def register(self, buffers: Sequence[torch.Tensor]) -> None:
        self._sizes = [buffer.nbytes for buffer in buffers]
        self._mover = mover(buffers)
        staging = self._carrier.open(SLOTS * self._slot_bytes)
        if buffers and buffers[0].is_cuda:
            pin(staging)
            self._pinned = staging
        self._slots = [staging[i * self._slot_bytes :][: self._slot_bytes] for i in range(SLOTS)]

    def connect(self, description: bytes, sizes: Sequence[int]) -> int:
        try:
            where = msgspec.msgpack.decode(description, type=Where)
        except msgspec.DecodeError as error:
            raise TransferError(f"the decode server describes itself in another way: {error}") from None
        if where.sizes != tuple(sizes):
            raise TransferError("the decode server's pools have other sizes than its layout says")
        target = _Target(where)
        self._open(target)
        self._next += 1
        self._targets[self._next] = target
        return self._next

    def write(self, receiver: int, pieces: Pieces) -> None:
        target = self._targets[receiver]
        pieces.check(self._sizes, target.where.sizes)
        try:
            self._write(target, pieces)
        except TransferError as error:
            self._drop(target)
            at = f"{target.where.host}:{target.where.port}"
            raise TransferError(f"the decode server's rank at {at} did not take the pages: {error}") from None

    def cut(self, receiver: int) -> None:
        target = self._targets.get(receiver)
        if target is not None:
            target.is_cut = True
            for channel in target.channels:
                channel.close()

    def disconnect(self, receiver: int) -> None:
        target = self._targets.pop(receiver, None)
        if target is not None:
            self._drop(target)

    def close(self) -> None:
        for receiver in list(self._targets):
            self.disconnect(receiver)
        if self._pinned is not None:
            unpin(self._pinned)
            self._pinned = None
        self._carrier.close()

    def _open(self, target: _Target) -> None:
        """Connect every lane."""
        try:
            for _ in range(LANES):
                target.channels += (self._greet(target.where),)
        except TransferError:
            self._drop(target)
            raise

    def _greet(self, where: Where) -> Channel:
        try:
            stream = socket.create_connection((where.host, where.port), self._timeout)
        except OSError as error:
            raise TransferError(
                f"the decode server's rank at {where.host}:{where.port} cannot be reached: "
                f"{error.strerror or error}"
            ) from None
        stream.settimeout(None)
        channel = Channel(stream, self._timeout)
        try:
            nbytes = SLOTS * self._slot_bytes
            channel.send(Greeting(secret=where.secret, carrier=self._carrier.description(), nbytes=nbytes))
            self._answer(channel, self._timeout)
        except TransferError:
            channel.close()
            raise
        return channel

    def _write(self, target: _Target, pieces: Pieces) -> None:
        assert self._mover is not None, "buffers are registered first"
        if target.is_cut:
            raise Closed("the decode server is gone")
        if not target.channels:
            self._open(target)
        lanes = [
            _Lane(channel, deque(), list(range(number, SLOTS, LANES)))
            for number, channel in enumerate(target.channels)
        ]
        share = -(-pieces.nbytes // SLOTS)
        limit = min(self._slot_bytes, max(share, GRAIN_BYTES))
        for number, each in enumerate(parts(pieces, limit, GRAIN_BYTES)):
            lane = lanes[number % LANES]
            if not lane.free:
                self._settle(lane)
            slot = lane.free.pop()
            source = Blocks.source(each)
            self._mover.gather(source, self._slots[slot])
            if target.is_cut:
                raise Closed("the decode server is gone")
            start = slot * self._slot_bytes
            part = Part(start=start, nbytes=source.nbytes, columns=Blocks.target(each).pack())
            lane.sent.append((slot, part))
            lane.channel.send(part)
        for lane in lanes:
            while lane.sent:
                self._settle(lane)

    def _settle(self, lane: _Lane) -> None:
        """Wait until a part has arrived; one that came too late to be written is sent again."""
        deadline = time.monotonic() + self._timeout
        while True:
            late = self._answer(lane.channel, deadline - time.monotonic()).late
            slot, part = lane.sent.popleft()
            if not late:
                lane.free.append(slot)
                return
            lane.sent.append((slot, part))
            lane.channel.send(part)

    def _answer(self, channel: Channel, seconds: float) -> Answer:
        answer = channel.receive(seconds)
        if not isinstance(answer, Answer):
            raise TransferError("it does not answer as a receiver does")
        if answer.error:
            raise TransferError(answer.error)
        return answer

    def _drop(self, target: _Target) -> None:
        for channel in target.channels:
            channel.close()
        target.channels = ()
