"""What a staged sender and receiver say to each other: msgpack behind a length of four bytes, over TCP."""

from __future__ import annotations

import select
import socket
import struct
import time
from contextlib import suppress

import msgspec

from interlock.kv.transfer.base import TransferError

MOST_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class Where(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """A receiver: where it listens, what lets a sender in, and the sizes of its buffers."""

    host: str
    port: int
    secret: bytes
    sizes: tuple[int, ...]


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """Sender -> receiver, first of all. ``carrier`` describes its ``nbytes`` of staging memory."""

    secret: bytes
    carrier: bytes
    nbytes: int


class Part(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """Sender -> receiver: fetch ``start : start + nbytes``, they are the blocks of ``columns``."""

    start: int
    nbytes: int
    columns: bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Receiver -> sender, one for each message. ``late``: nothing was written, say it again."""

    error: str = ""
    late: bool = False


Message = Greeting | Part | Answer
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


class Closed(TransferError):
    """The other end is gone."""


class Channel:
    """One connection. ``send`` and ``receive`` by one thread, ``close`` by any.

    Args:
        send_seconds: after which a peer that takes nothing counts as gone.
    """

    def __init__(self, stream: socket.socket, send_seconds: float) -> None:
        self._stream = stream
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", int(send_seconds), int(send_seconds % 1 * 1e6))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)

    def send(self, message: Message) -> None:
        """Raises ``Closed``."""
        body = _ENCODER.encode(message)
        try:
            self._stream.sendall(_LENGTH.pack(len(body)) + body)
        except (OSError, ValueError) as error:
            raise Closed(str(error)) from None

    def receive(self, seconds: float | None = None) -> Message:
        """Raises ``Closed``, and ``TransferError`` for silence or anything but a message."""
        deadline = None if seconds is None else time.monotonic() + seconds
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > MOST_BYTES:
            raise TransferError(f"a message of {length} bytes")
        try:
            return _DECODER.decode(self._exactly(length, deadline))
        except msgspec.DecodeError as error:
            raise TransferError(f"not a message of a transfer: {error}") from None

    @property
    def is_open(self) -> bool:
        """The other end has not closed it."""
        try:
            return self._stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        """Idempotent; ends a call of another thread that waits."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _exactly(self, count: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                if deadline is not None:
                    left = max(0.0, deadline - time.monotonic())
                    if not self._poll.poll(left * 1e3):
                        raise TransferError("no answer in time")
                more = self._stream.recv(min(count - len(data), 1 << 20))
            except (OSError, ValueError) as error:
                raise Closed(str(error)) from None
            if not more:
                raise Closed("the connection is closed")
            data += more
        return bytes(data)
