"""A prefill and a decode server as a user starts them, a proxy in front, a wire between that can fail."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from interlock.engine.endpoints import free_ports
from tests.conformance.installed import fake_install
from tests.e2e.pair import faulty_backend
from tests.e2e.pair.world import Place, World
from tests.e2e.processes import READY, Process, environment, wait_until

PEER_SECONDS, QUEUE_SECONDS, STALL_SECONDS = 3.0, 10.0, 8.0
FREE_SECONDS = 4 * PEER_SECONDS + QUEUE_SECONDS
ROLES = ("prefill", "decode")
SERVE = ("-m", "interlock", "serve", "tiny-random")
MODEL = (
    *("--threads", "1", "--dtype", "float32", "--max-model-len", "256", "--chunked-prefill-size", "32"),
    *("--page-size", "16", "--deterministic"),
)
PAIR = (
    *("--disaggregation-timeout", str(PEER_SECONDS), "--disaggregation-queue-timeout", str(QUEUE_SECONDS)),
    *("--stall-timeout", str(STALL_SECONDS), "--disaggregation-transfer-backend", faulty_backend.NAME),
)
MEMORY = {"prefill": "64MiB", "decode": "24MiB"}


@dataclass
class Server:
    """One of the two. ``process`` is None between a kill and the next start."""

    role: str
    place: Place
    url: str
    process: Process | None = None
    starts: int = 0

    def signal(self, whom: str, number: signal.Signals) -> None:
        """To the ``front`` end, or to a ``rank``."""
        assert self.process is not None
        victim = psutil.Process(self.process.popen.pid) if whom == "front" else self.process.ranks()[0]
        victim.send_signal(number)


@dataclass
class Cluster:
    """Attributes: ``folder``: for what the processes are told through files."""

    world: World
    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)
    servers: dict[str, Server] = field(default_factory=dict)
    router: str = ""

    def __post_init__(self) -> None:
        if not self.world.cable:
            ports = free_ports("127.0.0.1", 4)
            self.wire_port, self.bootstrap_port, prefill, decode = ports
        else:
            self.wire_port, self.bootstrap_port, prefill, decode = 8998, 8997, 8001, 8002
        for role, place, port in (
            ("prefill", self.world.prefill, prefill),
            ("decode", self.world.decode, decode),
        ):
            self.servers[role] = Server(role, place, f"http://{place.address}:{port}")
        self.fault_file = self.folder / "fault"
        self.control = str(self.folder / "wire")
        plugin = fake_install(
            self.folder / "site",
            "faulty",
            "interlock.transfer_backends",
            {faulty_backend.NAME: f"{faulty_backend.__name__}:BACKEND"},
        )
        env = environment()
        env["PYTHONPATH"] += f":{plugin}"
        self.env = env | {faulty_backend.FILE: str(self.fault_file)}

    # ---- processes

    def run(self, arguments: Sequence[str], prefix: Sequence[str] = ()) -> Process:
        process = Process(arguments, prefix=prefix, env=self.env)
        self.stack.callback(process.end)
        return process

    def launch(self, role: str) -> None:
        """Start the server of a role, again or for the first time; ``ready`` waits for it."""
        server = self.servers[role]
        address, _, port = server.url.removeprefix("http://").rpartition(":")
        flags = ["--host", address, "--port", port, "--disaggregation-mode", role]
        flags += ["--kv-memory", MEMORY[role]]
        if role == "prefill":
            flags += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        server.process = self.run([*SERVE, *MODEL, *PAIR, *flags], server.place.prefix)
        server.starts += 1

    def start(self) -> None:
        for role in ROLES:
            self.launch(role)
        prefill = self.servers["prefill"]
        host = prefill.place.address
        wire = ["-m", "tests.e2e.pair.wire_proxy", host, str(self.wire_port), host, str(self.bootstrap_port)]
        self.run([*wire, self.control], prefill.place.prefix).wait_for(READY)
        urls = ["--prefill", f"{prefill.url},{self.wire_port}", "--decode", self.servers["decode"].url]
        router = self.run(["-m", "interlock", "route", *urls, "--port", "0"])
        for role in ROLES:
            self.ready(role)
        self.router = router.wait_for(READY)[1]
        self.wait_routed()

    def ready(self, role: str) -> None:
        process = self.servers[role].process
        assert process is not None
        process.wait_for(READY)

    def restart(self, role: str) -> None:
        """End what is left of a server and start it again."""
        server = self.servers[role]
        if server.process is not None:
            server.process.end()
        self.launch(role)
        self.ready(role)

    def has_ended(self, role: str) -> bool:
        process = self.servers[role].process
        return process is None or process.popen.poll() is not None

    def wait_routed(self) -> None:
        """The router knows both as alive."""
        wait_until(lambda: healthy(self.router), "the router is healthy", 30)

    def close(self) -> None:
        self.stack.close()

    def tail(self, role: str) -> str:
        """The end of what a server said."""
        process = self.servers[role].process
        return "" if process is None else "\n".join(process.lines[-40:])

    # ---- faults

    def disturb(self, mode: str, seconds: float) -> None:
        """The transfer backend misbehaves for so long."""
        new = self.fault_file.with_suffix(".new")
        new.write_text(f"{mode} {time.monotonic() + seconds}")
        new.replace(self.fault_file)

    def wire(self, *order: str) -> Any:
        """Tell the wire; returns its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(self.control)
            connection.sendall(json.dumps(order).encode() + b"\n")
            return json.loads(connection.makefile().readline())

    def calm(self) -> None:
        """End every fault that can be ended."""
        self.fault_file.unlink(missing_ok=True)
        self.wire("pass")
        if self.world.cable:
            self.world.link(up=True)
        for server in self.servers.values():
            if server.process is not None and server.process.popen.poll() is None:
                for whom in ("front", "rank"):
                    with suppress(psutil.Error, IndexError):
                        server.signal(whom, signal.SIGCONT)

    # ---- what is seen

    def held(self, role: str) -> float:
        """Pages of a server that requests hold, of both spaces, and those that nothing may use yet."""
        text = httpx.get(f"{self.servers[role].url}/metrics", timeout=10).text
        totals: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            bare = name.partition("{")[0]
            totals[bare] = totals.get(bare, 0.0) + float(value) if not line.startswith("#") else 0.0
        total, free, cached = (totals[f"interlock:kv_pages{end}"] for end in ("", "_free", "_cached"))
        return total - free - cached

    def is_free(self, role: str) -> bool:
        try:
            return self.held(role) == 0
        except httpx.HTTPError:
            return False


def healthy(router: str) -> bool:
    try:
        return httpx.get(f"{router}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


async def until_seen(cluster: Cluster, kind: str, count: int, seconds: float) -> bool:
    """Wait until the wire has seen so many messages of a kind."""
    deadline = time.monotonic() + seconds
    while cluster.wire("count", kind) < count:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.005)
    return True
