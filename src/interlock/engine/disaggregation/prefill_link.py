"""The sockets of a prefill replica: its leader answers decode servers, its followers take orders to copy."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from interlock.engine.disaggregation.copier import Copier
from interlock.engine.disaggregation.half import Traffic
from interlock.engine.disaggregation.stream import Stream
from interlock.engine.disaggregation.threads import LoopThread, Mailbox
from interlock.engine.disaggregation.wire import (
    PROTOCOL,
    Attach,
    Close,
    Copy,
    Directory,
    Done,
    Farewell,
    Hello,
    Message,
    Open,
    Welcome,
)
from interlock.errors import InterlockError, StartupError
from interlock.kv.transfer.base import TransferError
from interlock.kv.transfer.layout import CacheLayout, refuse_different

_log = logging.getLogger("interlock.disaggregation")


@dataclass(slots=True)
class _Orders:
    """What was asked of all ranks and is not answered by all yet."""

    missing: set[int]
    when_done: Callable[[str], None]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ends:
    """What the link tells the scheduler's thread of."""

    heard: Callable[[int, Message], None]
    lost: Callable[[int], None]
    copied: Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Attributes: ``silence``: seconds after which a decode server is gone; ``secret``: of followers."""

    backend: str
    layout: CacheLayout
    silence: float
    start_seconds: float
    secret: bytes


class PrefillLink:
    """A ``CopyService``. Methods are called by the scheduler's thread unless they say otherwise."""

    def __init__(self, settings: Settings, copier: Copier, mailbox: Mailbox, thread: LoopThread) -> None:
        self._settings = settings
        self._copier = copier
        self._mailbox = mailbox
        self._thread = thread
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="interlock-kv-copy")
        self._ends: Ends | None = None
        self._peers: dict[int, Stream] = {}
        self._followers: dict[int, Stream] = {}
        self._orders: dict[tuple[str, int], _Orders] = {}
        self._numbers = 0
        self._addresses: tuple[str, ...] = ()
        self._server: asyncio.Server | None = None
        self._attached = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.traffic = Traffic()

    def listen(self, host: str, port: int) -> int:
        """Listen, port 0 takes a free one; returns the port.

        Raises:
            StartupError: the address cannot be had.
        """
        try:
            self._server = self._thread.run(
                asyncio.start_server(self._accept, host, port, limit=1 << 20)
            ).result()
        except OSError as error:
            raise StartupError(
                f"--disaggregation-bootstrap-port {port}: cannot listen on {host}: "
                f"{error.strerror or error}; choose another port"
            ) from None
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    def open(self, ends: Ends, addresses: Sequence[str]) -> None:
        """Wait for the followers, then answer decode servers. ``addresses``: of all replicas' leaders.

        Raises:
            StartupError: a follower did not come.
        """
        self._ends = ends
        self._addresses = tuple(addresses)
        try:
            self._thread.run(self._until_attached()).result(self._settings.start_seconds)
        except TimeoutError:
            raise StartupError("not every rank of the prefill replica reached its leader") from None

    def send(self, peer: int, message: Message) -> None:
        self._thread.call(self._send, peer, message)

    def copy(self, message: Copy) -> None:
        self._thread.call(self._copy, message)

    def close(self) -> None:
        self._thread.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._copier.close()

    # ---- in the loop

    async def _until_attached(self) -> None:
        if self._settings.layout.attn_tp > 1:
            await self._attached.wait()

    def _send(self, peer: int, message: Message) -> None:
        stream = self._peers.get(peer)
        if stream is not None:
            stream.send(message)

    def _copy(self, job: Copy) -> None:
        assert self._ends is not None
        if job.target not in self._peers:
            self._post(partial(self._ends.copied, job.job, "the decode server is gone"))
            return
        copied = self._ends.copied
        self._order("copy", job.job, job, lambda error: self._post(partial(copied, job.job, error)))

    def _order(self, kind: str, number: int, message: Copy | Open, when_done: Callable[[str], None]) -> None:
        """Have every rank do something; ``when_done`` hears the first error, or ""."""
        ranks = range(self._settings.layout.attn_tp)
        self._orders[kind, number] = _Orders(set(ranks), when_done)
        for stream in self._followers.values():
            stream.send(message)
        work = (
            partial(self._copier.copy, message)
            if isinstance(message, Copy)
            else partial(self._copier.open, message.target, message.layout, message.ranks)
        )
        future = asyncio.get_running_loop().run_in_executor(self._worker, work)
        future.add_done_callback(lambda done: self._done(kind, done.result()))

    def _done(self, kind: str, done: Done) -> None:
        orders = self._orders.get((kind, done.job))
        if orders is None:
            return
        orders.missing.discard(done.rank)
        orders.error = orders.error or done.error
        self.traffic.copies += kind == "copy"
        self.traffic.nbytes += done.nbytes
        self.traffic.seconds += done.seconds
        self.traffic.failures += kind == "copy" and bool(done.error)
        if not orders.missing:
            del self._orders[kind, done.job]
            orders.when_done(orders.error)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer, silence=self._settings.silence)
        stream.send(Directory(protocol=PROTOCOL, addresses=self._addresses))
        try:
            first = await asyncio.wait_for(stream.receive(), self._settings.silence)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, msgspec.DecodeError):
            stream.abort("it does not speak the protocol of prefill servers")
            return
        if isinstance(first, Attach) and hmac.compare_digest(first.secret, self._settings.secret):
            await self._follower(first.rank, reader, writer)
        elif isinstance(first, Hello) and self._ends is not None:
            await self._peer(first, stream)
        else:
            stream.send(Farewell(reason="the prefill server is still starting"))
            stream.close()

    async def _follower(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = Stream(reader, writer, silence=self._settings.start_seconds)
        self._followers[rank] = stream
        if len(self._followers) == self._settings.layout.attn_tp - 1:
            self._attached.set()
        reason = await stream.run(self._from_follower)
        for kind, number in list(self._orders):
            error = f"rank {rank} of the prefill server is gone: {reason}"
            self._done(kind, Done(job=number, rank=rank, error=error))

    def _from_follower(self, message: Message) -> None:
        if isinstance(message, Done):
            self._done("open" if message.job < 0 else "copy", message)

    async def _peer(self, hello: Hello, stream: Stream) -> None:
        """A decode server's connection, from the hand-shake to its end."""
        assert self._ends is not None
        self._numbers -= 1
        number = self._numbers
        problem = self._problem(hello) or await self._open(number, hello)
        if problem:
            _log.warning("a decode server is refused: %s", problem)
            stream.send(Farewell(reason=problem))
            stream.close()
            self._close_target(number)
            return
        self._peers[number] = stream
        self.traffic.peers = len(self._peers)
        stream.send(Welcome())
        heard, lost = self._ends.heard, self._ends.lost
        reason = await stream.run(lambda message: self._post(partial(heard, number, message)))
        _log.info("the connection to a decode server has ended: %s", reason)
        del self._peers[number]
        self.traffic.peers = len(self._peers)
        self._close_target(number)
        self._post(partial(lost, number))

    def _problem(self, hello: Hello) -> str:
        mine = self._settings
        try:
            if hello.protocol != PROTOCOL:
                raise TransferError(
                    f"the prefill server speaks version {PROTOCOL} of the protocol and the decode server "
                    f"{hello.protocol}; run the same version of interlock"
                )
            if hello.backend != mine.backend:
                raise TransferError(
                    f"--disaggregation-transfer-backend: the prefill server has {mine.backend} and the "
                    f"decode server {hello.backend}"
                )
            hello.layout.check()
            refuse_different(mine.layout, hello.layout)
            if len(hello.ranks) != hello.layout.attn_tp:
                raise TransferError(f"{len(hello.ranks)} ranks for attn_tp {hello.layout.attn_tp}")
        except InterlockError as error:
            return str(error)
        return ""

    async def _open(self, number: int, hello: Hello) -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        message = Open(target=number, layout=hello.layout, ranks=hello.ranks)

        def finish(error: str) -> None:
            if not done.done():
                done.set_result(error)

        self._order("open", number, message, finish)
        try:
            return await asyncio.wait_for(done, self._settings.silence)
        except TimeoutError:
            return "the pools of the decode server could not be mapped in time"

    def _close_target(self, number: int) -> None:
        self._copier.cut(number)
        for stream in self._followers.values():
            stream.send(Close(target=number))
        asyncio.get_running_loop().run_in_executor(self._worker, self._copier.close_target, number)

    def _post(self, call: Callable[[], None]) -> None:
        self._mailbox.post(call)


@dataclass(slots=True)
class FollowerLink:
    """The other end of ``PrefillLink`` on a follower: runs until ``close``."""

    copier: Copier
    rank: int
    thread: LoopThread
    silence: float
    _task: asyncio.Task[None] | None = None
    _worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="interlock-kv-copy")
    )

    def attach(self, host: str, port: int, secret: bytes) -> None:
        """Raises ``StartupError`` when the leader cannot be reached."""
        try:
            self.thread.run(self._attach(host, port, secret)).result(self.silence)
        except (OSError, TimeoutError) as error:
            raise StartupError(f"the leader of the prefill replica cannot be reached: {error}") from None

    def close(self) -> None:
        self.thread.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self.copier.close()

    async def _attach(self, host: str, port: int, secret: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        stream = Stream(reader, writer, silence=self.silence)
        await stream.receive()
        stream.send(Attach(rank=self.rank, secret=secret))
        self._task = asyncio.get_running_loop().create_task(self._run(stream))

    async def _run(self, stream: Stream) -> None:
        await stream.run(partial(self._handle, stream))

    def _handle(self, stream: Stream, message: Message) -> None:
        match message:
            case Copy():
                work = partial(self.copier.copy, message)
            case Open():
                work = partial(self.copier.open, message.target, message.layout, message.ranks)
            case Close(target=target):
                self.copier.cut(target)
                asyncio.get_running_loop().run_in_executor(self._worker, self.copier.close_target, target)
                return
            case _:
                return
        future = asyncio.get_running_loop().run_in_executor(self._worker, work)
        future.add_done_callback(lambda done: stream.send(done.result()))
