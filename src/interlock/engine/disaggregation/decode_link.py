"""The sockets of a decode replica: its leader connects to the prefill servers that requests name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from interlock.engine.disaggregation.half import Traffic
from interlock.engine.disaggregation.stream import Stream, cause
from interlock.engine.disaggregation.threads import LoopThread, Mailbox
from interlock.engine.disaggregation.wire import (
    PROTOCOL,
    Directory,
    Farewell,
    Hello,
    Key,
    Message,
    Welcome,
    replica_of,
)
from interlock.engine.messages import Meeting
from interlock.errors import InterlockError

_log = logging.getLogger("interlock.disaggregation")
MOST_REPLICAS = 1024


@dataclass(frozen=True, slots=True)
class Ends:
    """What the link tells the scheduler's thread of."""

    heard: Callable[[int, Message], None]
    lost: Callable[[int, str], None]


@dataclass(slots=True)
class _Peer:
    """One prefill server. ``early``: messages from before it was connected; ``streams``: one a replica."""

    number: int
    name: str
    early: list[Message] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    is_open: bool = False
    task: asyncio.Task[None] | None = None


class DecodeLink:
    """A ``PeerService``. Methods are called by the scheduler's thread unless they say otherwise.

    Args:
        hello: what every prefill server is told.
        seconds: for a connection and its hand-shake; also the silence after which a server counts as gone.
    """

    def __init__(self, hello: Hello, seconds: float, mailbox: Mailbox, thread: LoopThread) -> None:
        self._hello = hello
        self._seconds = seconds
        self._mailbox = mailbox
        self._thread = thread
        self._ends: Ends | None = None
        self._numbers: dict[tuple[str, int], int] = {}
        self._last = 0
        self._peers: dict[int, _Peer] = {}
        self.traffic = Traffic()

    def open(self, ends: Ends) -> None:
        self._ends = ends

    def reach(self, meeting: Meeting) -> int:
        where = (meeting.host, meeting.port)
        number = self._numbers.get(where)
        if number is None:
            self._last += 1
            number = self._numbers[where] = self._last
            self._thread.call(self._start, number, *where)
        return number

    def send(self, peer: int, message: Message) -> None:
        self._thread.call(self._send, peer, message)

    def drop(self, peer: int) -> None:
        self._thread.call(self._drop, peer, "it did not stop writing in time")

    def close(self) -> None:
        self._thread.close()

    # ---- in the loop

    def _start(self, number: int, host: str, port: int) -> None:
        peer = self._peers[number] = _Peer(number, f"{host}:{port}")
        peer.task = asyncio.get_running_loop().create_task(self._run(peer, host, port))

    def _send(self, number: int, message: Message) -> None:
        peer = self._peers.get(number)
        if peer is None:
            return
        if not peer.is_open:
            peer.early.append(message)
            return
        key: Key = message.key  # type: ignore[union-attr]
        peer.streams[replica_of(key, len(peer.streams))].send(message)

    def _drop(self, number: int, reason: str) -> None:
        peer = self._peers.get(number)
        for stream in peer.streams if peer else ():
            stream.abort(reason)

    async def _run(self, peer: _Peer, host: str, port: int) -> None:
        try:
            await asyncio.wait_for(self._connect(peer, host, port), self._seconds)
        except TimeoutError:
            reason = f"no answer within {self._seconds:g} s"
        except asyncio.IncompleteReadError:
            reason = "it closed the connection"
        except (OSError, InterlockError, ValueError, msgspec.DecodeError) as error:
            reason = cause(error)
        else:
            reason = await self._listen(peer)
        for stream in peer.streams:
            stream.abort(reason)
        del self._peers[peer.number]
        self.traffic.peers -= peer.is_open
        _log.info("the connection to the prefill server %s has ended: %s", peer.name, reason)
        self._mailbox.post(partial(self._lost, peer, (host, port), reason))

    def _lost(self, peer: _Peer, where: tuple[str, int], reason: str) -> None:
        """In the scheduler's thread."""
        assert self._ends is not None
        if self._numbers.get(where) == peer.number:
            del self._numbers[where]
        self._ends.lost(peer.number, f"prefill server {peer.name}: {reason}")

    async def _connect(self, peer: _Peer, host: str, port: int) -> None:
        directory = await self._greet(peer, host, port)
        for address in directory.addresses[1:]:
            other, _, number = address.rpartition(":")
            await self._greet(peer, other or host, int(number))
        peer.is_open = True
        self.traffic.peers += 1
        for message in peer.early:
            self._send(peer.number, message)
        peer.early.clear()

    async def _greet(self, peer: _Peer, host: str, port: int) -> Directory:
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        stream = Stream(reader, writer, silence=self._seconds)
        peer.streams.append(stream)
        directory = await stream.receive()
        if not isinstance(directory, Directory) or directory.protocol != PROTOCOL:
            raise InterlockError("it does not speak this version of the protocol of prefill servers")
        if not 1 <= len(directory.addresses) <= MOST_REPLICAS:
            raise InterlockError("it is still starting")
        stream.send(self._hello)
        answer = await stream.receive()
        if isinstance(answer, Farewell):
            raise InterlockError(f"it refuses this decode server: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise InterlockError("it does not speak the protocol of prefill servers")
        return directory

    async def _listen(self, peer: _Peer) -> str:
        """Until one of the replicas' connections ends; returns why."""
        assert self._ends is not None
        heard = self._ends.heard

        def on_message(message: Message) -> None:
            self._mailbox.post(partial(heard, peer.number, message))

        runs = [asyncio.ensure_future(stream.run(on_message)) for stream in peer.streams]
        done, rest = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        for each in rest:
            each.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        return next(iter(done)).result()
