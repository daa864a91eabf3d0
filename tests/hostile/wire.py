"""HTTP over a plain socket, so that clients can be as rude as they like."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass
from urllib.parse import urlsplit

ANSWER_SECONDS = 300.0
"""Far above what an answer takes on a busy machine: more is a request that was lost."""
LIMIT = 1 << 24


@dataclass(frozen=True)
class Answer:
    """What came back: status 0 when the connection was closed without an answer."""

    status: int
    body: bytes = b""
    media_type: str = ""


class Wire:
    """One connection, opened when it is needed and again after it was closed."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._address = (parts.hostname, parts.port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, payload: bytes) -> None:
        """Send bytes; a connection that was closed meanwhile is opened anew."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=LIMIT)
        self._writer.write(payload)
        await self._writer.drain()

    async def receive(self) -> Answer:
        """The next answer, whole. Closes the connection when the server does."""
        try:
            return await asyncio.wait_for(self._receive(), ANSWER_SECONDS)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            return Answer(0)

    async def some(self, count: int) -> bytes:
        """Up to ``count`` bytes of an answer, as they come."""
        assert self._reader is not None
        return await self._reader.read(count)

    async def ask(self, payload: bytes) -> Answer:
        try:
            await self.send(payload)
        except ConnectionError:
            self.close()
            return Answer(0)
        return await self.receive()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    def vanish(self) -> None:
        """Close with a reset, as a killed process or a pulled cable would."""
        if self._writer is not None:
            own: socket.socket | None = self._writer.get_extra_info("socket")
            if own is not None:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _receive(self) -> Answer:
        assert self._reader is not None
        while True:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split()[1])
            if status != 100:
                break
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        body = await self._body(headers, status)
        if headers.get("connection", "").lower() == "close" or head[0].startswith("HTTP/1.0"):
            self.close()
        return Answer(status, body, headers.get("content-type", ""))

    async def _body(self, headers: dict[str, str], status: int) -> bytes:
        assert self._reader is not None
        if status in (204, 304):
            return b""
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            body = await self._reader.read(-1)
            self.close()
            return body
        parts = []
        while size := int((await self._reader.readline()).strip(), 16):
            parts.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return b"".join(parts)


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request; ``headers`` are whole lines, which may contradict what is added."""
    names = {line.partition(":")[0].strip().lower() for line in headers}
    lines = [f"{method} {path} HTTP/1.1", *headers]
    for name, value in (
        ("Host", "x"),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ):
        if name.lower() not in names and "transfer-encoding" not in names:
            lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass") + body
