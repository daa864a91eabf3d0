"""A wire between a decode server and a prefill server's bootstrap port that tests disturb.

    python -m tests.e2e.pair.wire_proxy LISTEN_HOST LISTEN_PORT TARGET_HOST TARGET_PORT CONTROL_SOCKET

It knows where messages begin and end. Each line on the control socket is a JSON list, answered by a line:

    ["pass"]              from now on all is well; what was kept is delivered
    ["duplicate"]         every message twice
    ["reorder"]           messages of different requests overtake each other
    ["scramble"]          messages of the same request as well
    ["hold", KIND]        messages of this kind, and all that follow of their request, are kept
    ["freeze"]            nothing is delivered in either direction, connections stay
    ["cut"]               every connection is reset; later ones are served
    ["count", KIND]       answers how many messages of this kind have come so far
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec

from interlock.engine.disaggregation.wire import LENGTH

WINDOW_SECONDS = 0.05
UNKEYED = ("directory", "hello", "welcome", "farewell", "ping")


class Way:
    """One direction of one connection."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._kept: list[tuple[str, Any, bytes]] = []
        self._held: set[Any] = set()

    async def run(self) -> None:
        flush = asyncio.create_task(self._flush_often())
        try:
            while True:
                head = await self._reader.readexactly(LENGTH.size)
                body = await self._reader.readexactly(LENGTH.unpack(head)[0])
                self._take(head + body, msgspec.msgpack.decode(body))
        finally:
            flush.cancel()

    def _take(self, frame: bytes, message: dict[str, Any]) -> None:
        kind, key = message["type"], tuple(message.get("key", ()))
        self._proxy.seen[kind] += 1
        mode = self._proxy.mode
        if mode[0] == "hold" and kind == mode[1]:
            self._held.add(key)
        at_once = mode[0] != "freeze" and kind in UNKEYED
        if at_once or (mode[0] in ("pass", "duplicate") and not self._kept):
            self._writer.write(frame * (2 if mode[0] == "duplicate" and not at_once else 1))
        elif mode[0] == "hold" and key not in self._held:
            self._writer.write(frame)
        else:
            self._kept.append((kind, key, frame))

    async def _flush_often(self) -> None:
        """Deliver what is kept, in the order that the mode makes of it."""
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            mode = self._proxy.mode[0]
            if mode in ("freeze", "hold") or not self._kept:
                continue
            kept, self._kept, self._held = self._kept, [], set()
            if mode in ("reorder", "scramble"):
                mixed = random.sample(kept, len(kept))
                kept = mixed if mode == "scramble" else in_order_of_each_key(mixed, kept)
            with suppress(OSError):
                for _, _, frame in kept:
                    self._writer.write(frame)


def in_order_of_each_key(
    mixed: list[tuple[str, Any, bytes]], order: list[tuple[str, Any, bytes]]
) -> list[tuple[str, Any, bytes]]:
    """The keys take turns as in ``mixed``; each key's own messages come as in ``order``."""
    queues: dict[Any, list[tuple[str, Any, bytes]]] = {}
    for each in order:
        queues.setdefault(each[1], []).append(each)
    return [queues[key].pop(0) for _, key, _ in mixed]


class Proxy:
    """Attributes: ``mode``: the last order; ``seen``: messages by kind."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.mode: list[str] = ["pass"]
        self.seen: Counter[str] = Counter()
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            reset(writer)
            return
        pair = {writer, far_writer}
        self._writers |= pair
        runs = [
            asyncio.ensure_future(Way(self, reader, far_writer).run()),
            asyncio.ensure_future(Way(self, far_reader, writer).run()),
        ]
        await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        for each in runs:
            each.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        self._writers -= pair
        for each in pair:
            each.close()

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            order: list[str] = json.loads(line)
            if order[0] == "cut":
                for each in list(self._writers):
                    reset(each)
            elif order[0] != "count":
                self.mode = order
            writer.write(json.dumps(self.seen[order[1]] if order[0] == "count" else "ok").encode() + b"\n")
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """RST, as of a machine that forgot the connection."""
    with suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def main(host: str, port: str, target: str, target_port: str, control: str) -> None:
    proxy = Proxy((target, int(target_port)))
    servers = [
        await asyncio.start_server(proxy.serve, host, int(port)),
        await asyncio.start_unix_server(proxy.control, control),
    ]
    print("ready: http://wire", flush=True)
    await asyncio.gather(*(each.serve_forever() for each in servers))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
