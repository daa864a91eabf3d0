"""One TCP connection that carries messages: framed, bounded, with signs of life. Lives in an event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from interlock.engine.disaggregation.wire import LENGTH, MOST_BYTES, Message, Ping, pack, unpack

PING_SECONDS = 1.0


def cause(error: Exception) -> str:
    """Why a connection could not be made, or ended: the system's words where it has some."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error) or type(error).__name__


class Stream:
    """A connection. ``close`` may be called by anybody of the loop; ``run`` ends then.

    Args:
        silence: seconds without a word of the peer after which it counts as gone.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence: float) -> None:
        self._reader = reader
        self._writer = writer
        self._silence = silence
        self._reason = ""
        for option, value in ((socket.TCP_NODELAY, 1),):
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Queue a message; it is lost when the connection is."""
        if not self._writer.is_closing():
            self._writer.write(pack(message))

    async def run(self, on_message: Callable[[Message], None]) -> str:
        """Read until the connection ends; returns why it did."""
        pings = asyncio.create_task(self._ping())
        try:
            while True:
                message = await asyncio.wait_for(self.receive(), self._silence)
                if not isinstance(message, Ping):
                    on_message(message)
        except TimeoutError:
            return self._reason or f"nothing was heard for {self._silence:g} s"
        except asyncio.IncompleteReadError:
            return self._reason or "the other side closed the connection"
        except (OSError, ValueError, msgspec.DecodeError) as error:
            return self._reason or cause(error)
        finally:
            pings.cancel()
            self._writer.close()

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ValueError, msgspec.DecodeError: the peer does not speak this protocol.
            asyncio.IncompleteReadError, OSError: the connection is gone.
        """
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes; at most {MOST_BYTES} are taken")
        return unpack(await self._reader.readexactly(length))

    def close(self, reason: str = "") -> None:
        """End the connection after what is queued is sent."""
        self._reason = self._reason or reason
        self._writer.close()

    def abort(self, reason: str) -> None:
        """End the connection now."""
        self._reason = self._reason or reason
        self._writer.transport.abort()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(min(PING_SECONDS, self._silence / 3))
            self.send(Ping())
