"""The decode side of a staged transfer: fetches what senders tell of, checks it, scatters it to the pages."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Queue

import msgspec
import torch

from interlock.errors import InterlockError, StartupError
from interlock.kv.transfer.base import TransferError
from interlock.kv.transfer.staged.carrier import LANDING_ROOMS, Landing, TargetCarrier
from interlock.kv.transfer.staged.channel import Answer, Channel, Closed, Greeting, Message, Part, Where
from interlock.kv.transfer.staged.mover import Blocks, Mover, mover

_log = logging.getLogger("interlock.disaggregation")
LEASE_SECONDS = 5.0
"""A part that takes longer to fetch is not written but asked for again."""

SCATTER_SECONDS = 2.0
CLOSE_SECONDS = 5.0
MOST_STAGING = 1 << 30
_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A part that was fetched. ``begun``: when it was heard of, on the monotonic clock."""

    begun: float
    blocks: Blocks
    packed: torch.Tensor


class StagedReceiver:
    """``KVReceiver``; see ``base``.

    Args:
        host: address that senders reach this process at; it listens there.
        timeout: seconds for the greeting of a sender.
    """

    def __init__(self, carrier: TargetCarrier, host: str, *, timeout: float) -> None:
        self._carrier = carrier
        self._host = host
        self._timeout = timeout
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._sizes: list[int] = []
        self._mover: Mover | None = None
        self._server: socket.socket | None = None
        self._channels: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    @property
    def settle_seconds(self) -> float:
        return LEASE_SECONDS + SCATTER_SECONDS

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def register(self, buffers: Sequence[torch.Tensor]) -> bytes:
        self._sizes = [buffer.nbytes for buffer in buffers]
        self._mover = mover(buffers)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._server = socket.create_server((self._host, 0), family=family)
        except OSError as error:
            raise StartupError(
                f"--host: cannot listen for pages on {self._host}: {error.strerror or error}"
            ) from None
        self._run("interlock-kv-accept", self._accept, self._server)
        where = Where(
            host=self._host,
            port=self._server.getsockname()[1],
            secret=self._secret,
            sizes=tuple(self._sizes),
        )
        return msgspec.msgpack.encode(where)

    def close(self) -> None:
        with self._lock:
            server, self._server = self._server, None
            channels, threads = list(self._channels), list(self._threads)
        if server is not None:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(CLOSE_SECONDS)
        if server is not None:
            self._carrier.close()

    def _run(self, name: str, function: Callable[..., None], *arguments: object) -> None:
        """In a thread that ``close`` waits for: none may be left in a library when the process ends."""
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    # ---- threads: one that accepts, one for each sender

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                stream, _ = server.accept()
            except OSError:
                return
            channel = Channel(stream, self._timeout)
            with self._lock:
                if self._server is None:
                    channel.close()
                    return
                self._channels.add(channel)
                self._threads = {each for each in self._threads if each.is_alive()}
                self._run("interlock-kv", self._serve, channel)

    def _serve(self, channel: Channel) -> None:
        landing: Landing | None = None
        try:
            landing, nbytes = self._greet(channel)
            channel.send(Answer())
            self._pass_on(channel, landing, nbytes)
        except Closed:
            pass
        except Exception as error:
            text = str(error) if isinstance(error, InterlockError) else f"{type(error).__name__}: {error}"
            _log.warning("a transfer is given up: %s", text)
            self._tell(channel, text)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
            if landing is not None:
                landing.close()

    def _greet(self, channel: Channel) -> tuple[Landing, int]:
        greeting = channel.receive(self._timeout)
        if not isinstance(greeting, Greeting) or not hmac.compare_digest(greeting.secret, self._secret):
            raise TransferError("the sender does not know this receiver's secret")
        if not 0 < greeting.nbytes <= MOST_STAGING:
            raise TransferError(f"{greeting.nbytes} bytes of staging memory; at most {MOST_STAGING}")
        return self._carrier.reach(greeting.carrier, greeting.nbytes), greeting.nbytes

    def _pass_on(self, channel: Channel, landing: Landing, nbytes: int) -> None:
        """Fetch parts while another thread scatters those before and answers."""
        arrived: Queue[_Arrived | None] = Queue(maxsize=LANDING_ROOMS - 2)
        failure: list[Exception] = []

        def scatter() -> None:
            while (each := arrived.get()) is not None:
                try:
                    if not failure:
                        channel.send(self._scatter(channel, each))
                except Exception as error:
                    failure.append(error)

        worker = threading.Thread(target=scatter, name="interlock-kv-pages", daemon=True)
        worker.start()
        try:
            while not failure:
                arrived.put(self._fetch(channel.receive(), landing, nbytes))
        finally:
            arrived.put(None)
            worker.join()
        raise failure[0]

    def _fetch(self, message: Message, landing: Landing, nbytes: int) -> _Arrived:
        begun = time.monotonic()
        if not isinstance(message, Part):
            raise TransferError("a part is expected")
        part = message
        if part.start < 0 or part.nbytes < 0 or part.start + part.nbytes > nbytes:
            raise TransferError("a part leaves the sender's staging memory")
        blocks = Blocks.unpack(part.columns)
        blocks.check(self._sizes, part.nbytes)
        return _Arrived(begun, blocks, landing.fetch(part.start, part.nbytes))

    def _scatter(self, channel: Channel, each: _Arrived) -> Answer:
        """Write one part to its pages, unless its sender has gone meanwhile or has waited too long."""
        assert self._mover is not None
        if not channel.is_open:
            raise Closed("the sender has gone")
        if time.monotonic() - each.begun > LEASE_SECONDS:
            return Answer(late=True)
        self._mover.scatter(each.blocks, each.packed)
        return Answer()

    def _tell(self, channel: Channel, error: str) -> None:
        with suppress(Closed):
            channel.send(Answer(error=error))
