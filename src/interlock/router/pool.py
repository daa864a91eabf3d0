"""Servers of one kind behind the proxy: whose turn it is, and which of them do not answer."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from interlock.errors import Refusal
from interlock.plan.disaggregation import BOOTSTRAP_PORT

HEALTH_SECONDS = 1.0
LOST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Backend:
    """One server. ``bootstrap_port`` is a prefill server's."""

    url: str
    bootstrap_port: int = BOOTSTRAP_PORT

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


def parse_backend(text: str, option: str) -> Backend:
    """``URL`` or ``URL,BOOTSTRAP_PORT``. Raises ``Refusal`` for anything else."""
    address, _, port = text.partition(",")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or (port and not port.isdecimal()):
        raise Refusal(
            option=option,
            given=text,
            rule="is no URL with, for a prefill server, the bootstrap port behind a comma",
            alternatives=[f"{option} http://127.0.0.1:8000"],
        )
    return Backend(address.rstrip("/"), int(port) if port else BOOTSTRAP_PORT)


@dataclass(slots=True)
class Pool:
    """Servers in turn; those that are not ready are passed over until their /ready says so."""

    kind: str
    backends: tuple[Backend, ...]
    _out: set[Backend] = field(default_factory=set)
    _silent_since: dict[Backend, float] = field(default_factory=dict)
    _turn: int = 0

    def take(self, without: frozenset[Backend] = frozenset()) -> Backend | None:
        """The next server, or None when every other one than ``without`` is out."""
        for _ in self.backends:
            backend = self.backends[self._turn % len(self.backends)]
            self._turn += 1
            if backend not in self._out and backend not in without:
                return backend
        return None

    def note(self, backend: Backend, *, alive: bool) -> None:
        (self._out.discard if alive else self._out.add)(backend)

    @property
    def alive(self) -> int:
        return len(self.backends) - len(self._out)

    async def until_lost(self, backend: Backend) -> None:
        """Wait until a server has said nothing at all for so long that its requests are given up."""
        while time.monotonic() - self._silent_since.get(backend, math.inf) < LOST_SECONDS:
            await asyncio.sleep(HEALTH_SECONDS / 2)

    async def watch(self, client: httpx.AsyncClient) -> None:
        """Ask every server whether it is ready, for ever."""
        while True:
            await asyncio.gather(*(self._check(client, backend) for backend in self.backends))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _check(self, client: httpx.AsyncClient, backend: Backend) -> None:
        try:
            answer = await client.get(f"{backend.url}/ready", timeout=HEALTH_SECONDS * 3)
            self._silent_since.pop(backend, None)
            self.note(backend, alive=answer.status_code == 200)
        except httpx.HTTPError:
            self._silent_since.setdefault(backend, time.monotonic())
            self.note(backend, alive=False)
