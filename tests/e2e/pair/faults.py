"""What is done to a pair while clients ask it. Each fault ends by itself or is ended by ``Cluster.calm``."""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.e2e.pair.clients import End, ask, streaming
from tests.e2e.pair.cluster import PEER_SECONDS, QUEUE_SECONDS, Cluster, until_seen

DEADLINE_SECONDS = 5 * PEER_SECONDS + 2 * QUEUE_SECONDS + 10.0
LONG = (1.5 * PEER_SECONDS, 3.5 * PEER_SECONDS)
SHORT = (0.1, 0.5 * PEER_SECONDS)


@dataclass
class Scene:
    """One episode: the requests under way and what a fault did.

    Attributes:
        asked: body and task of each client whose answer must be whole or one error.
        halves: clients of the prefill server, whose answer is nobody's.
        dead: servers that the fault ends.
    """

    cluster: Cluster
    rng: random.Random
    bodies: list[dict[str, Any]]
    asked: list[tuple[dict[str, Any], asyncio.Task[End]]] = field(default_factory=list)
    halves: list[asyncio.Task[End]] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)

    def ask(self, body: dict[str, Any] | None = None) -> asyncio.Task[End]:
        """A client of the router."""
        body = body or self.rng.choice(self.bodies)
        sent = streaming(body) if self.rng.random() < 0.5 else body
        task = asyncio.create_task(ask(self.cluster.router, sent, deadline=DEADLINE_SECONDS))
        self.asked.append((body, task))
        return task

    async def ask_some(self, most: int = 4) -> None:
        for _ in range(self.rng.randint(1, most)):
            self.ask()
            await asyncio.sleep(self.rng.choice([0, 0.01, 0.1]))

    def ask_halves(
        self, body: dict[str, Any], roles: tuple[str, ...] = ("prefill", "decode")
    ) -> dict[str, asyncio.Task[End]]:
        """Ask the servers as a router does."""
        cluster = self.cluster
        room = {
            "bootstrap_host": cluster.world.prefill.address,
            "bootstrap_port": cluster.wire_port,
            "bootstrap_room": secrets.randbits(62),
        }
        tasks = {}
        for role in roles:
            sent = streaming(body) if role == "decode" else body
            tokens = None if role == "decode" else min(1, body["max_tokens"])
            asking = ask(cluster.servers[role].url, sent | room, deadline=DEADLINE_SECONDS, tokens=tokens)
            tasks[role] = asyncio.create_task(asking)
        if "decode" in tasks:
            self.asked.append((body, tasks["decode"]))
        if "prefill" in tasks:
            self.halves.append(tasks["prefill"])
        return tasks

    def long_body(self) -> dict[str, Any]:
        """The one that is under way for longest."""
        return max(self.bodies, key=lambda body: len(body["prompt"]) + body["max_tokens"])

    async def a_moment(self, most: float = 0.4) -> None:
        await asyncio.sleep(self.rng.uniform(0, most))


Fault = Callable[[Scene], Awaitable[None]]


async def kill(scene: Scene, role: str, whom: str) -> None:
    await scene.ask_some()
    await scene.a_moment()
    scene.cluster.servers[role].signal(whom, signal.SIGKILL)
    scene.dead.add(role)


async def stop(scene: Scene, role: str, whom: str, seconds: tuple[float, float] | None) -> None:
    """Stopped for so long, or, None, until the server ends itself."""
    await scene.ask_some()
    await scene.a_moment()
    server = scene.cluster.servers[role]
    server.signal(whom, signal.SIGSTOP)
    if seconds is None:
        scene.dead.add(role)
        return
    await asyncio.sleep(0.05)
    scene.ask()
    await asyncio.sleep(scene.rng.uniform(*seconds))
    server.signal(whom, signal.SIGCONT)


async def stop_for_ever(scene: Scene) -> None:
    """A front end that never goes on; the router tells its clients."""
    await scene.ask_some()
    server = scene.cluster.servers["decode"]
    server.signal("front", signal.SIGSTOP)
    scene.dead.add("decode")
    scene.ask()
    await asyncio.wait([task for _, task in scene.asked])
    server.signal("front", signal.SIGKILL)


async def cable(scene: Scene, seconds: tuple[float, float]) -> None:
    """The link between the two namespaces goes down and comes back."""
    await scene.ask_some()
    await scene.a_moment()
    world = scene.cluster.world
    if not world.cable:
        await freeze(scene, seconds)
        return
    world.link(up=False)
    await scene.ask_some(2)
    await asyncio.sleep(scene.rng.uniform(*seconds))
    world.link(up=True)


async def freeze(scene: Scene, seconds: tuple[float, float]) -> None:
    await scene.ask_some()
    scene.cluster.wire("freeze")
    await scene.ask_some(2)
    await asyncio.sleep(scene.rng.uniform(*seconds))
    scene.cluster.wire("pass")


async def cut(scene: Scene, times: int) -> None:
    for _ in range(times):
        await scene.ask_some()
        await scene.a_moment()
        scene.cluster.wire("cut")


async def disturb(scene: Scene, mode: str, seconds: tuple[float, float]) -> None:
    """The transfer itself."""
    duration = scene.rng.uniform(*seconds)
    scene.cluster.disturb(mode, duration)
    await scene.ask_some(6)
    await asyncio.sleep(duration)


async def messages(scene: Scene, mode: str) -> None:
    scene.cluster.wire(mode)
    await scene.ask_some(6)
    await asyncio.sleep(scene.rng.uniform(0.2, 1.0))
    scene.cluster.wire("pass")


async def flood(scene: Scene, seconds: float) -> None:
    """More than the decode server has pages for, some of which do not move for a while."""
    scene.cluster.disturb("stall", seconds)
    for _ in range(16):
        scene.ask(scene.rng.choice([scene.long_body(), *scene.bodies]))
    await asyncio.sleep(seconds)


async def half(scene: Scene, role: str) -> None:
    """The router asks one server only."""
    scene.ask_halves(scene.rng.choice(scene.bodies), (role,))
    await scene.ask_some(2)


async def storm(scene: Scene) -> None:
    """Clients that go away at any moment, among others that stay."""
    leaving = []
    for _ in range(12):
        task = scene.ask()
        if scene.rng.random() < 0.6:
            leaving.append(asyncio.create_task(leave(task, scene.rng.uniform(0, 0.6))))
        await asyncio.sleep(scene.rng.choice([0, 0.02]))
    await asyncio.gather(*leaving)


async def leave(task: asyncio.Task[End], seconds: float) -> None:
    await asyncio.sleep(seconds)
    task.cancel()


STATES = ("meeting", "matched", "waiting", "reserved", "computing", "sending", "handing over", "decoding")
LEAVERS = (("prefill", "decode"), ("prefill",), ("decode",))
HELD = {"meeting": "join", "matched": "matched", "reserved": "reserve", "handing over": "hand_over"}
ABORTS = tuple((state, who) for state in STATES for who in LEAVERS)


async def abort(scene: Scene, state: str, who: tuple[str, ...]) -> None:
    """Clients of one or both servers go away in this state of the request."""
    cluster, body = scene.cluster, scene.long_body()
    if state in ("waiting", "sending"):
        cluster.disturb("stall", PEER_SECONDS * 0.8)
    if state == "waiting":
        for _ in range(12):
            scene.ask(scene.long_body())
        await asyncio.sleep(0.3)
    else:
        await scene.ask_some(2)
    awaited = HELD.get(state) or {"sending": "sending", "computing": "reserve"}.get(state, "join")
    before = cluster.wire("count", awaited)
    if state in HELD:
        cluster.wire("hold", HELD[state])
    tasks = scene.ask_halves(body)
    await until_seen(cluster, awaited, before + 1, PEER_SECONDS)
    if state == "decoding":
        before = cluster.wire("count", "hand_over")
        await until_seen(cluster, "hand_over", before + 1, 0.5)
    await scene.a_moment(0.05)
    for role in who:
        tasks[role].cancel()
    await scene.a_moment()


FAULTS: dict[str, Fault] = {
    **{
        f"{role} {whom} killed": partial(kill, role=role, whom=whom)
        for role in ("prefill", "decode")
        for whom in ("rank", "front")
    },
    **{
        f"{role} {whom} stopped, {name}": partial(stop, role=role, whom=whom, seconds=seconds)
        for role in ("prefill", "decode")
        for whom in ("rank", "front")
        for name, seconds in (("short", SHORT), ("long", LONG if whom == "front" else None))
    },
    "decode front stopped, for ever": stop_for_ever,
    "link down, short": partial(cable, seconds=SHORT),
    "link down, long": partial(cable, seconds=LONG),
    "connection silent": partial(freeze, seconds=LONG),
    "connection reset": partial(cut, times=1),
    "connection reset again": partial(cut, times=3),
    "transfer stalls, short": partial(disturb, mode="stall", seconds=SHORT),
    "transfer stalls, long": partial(disturb, mode="stall", seconds=LONG),
    "transfer slow": partial(disturb, mode="slow", seconds=SHORT),
    "transfer reordered": partial(disturb, mode="reorder", seconds=SHORT),
    "transfer duplicated": partial(disturb, mode="duplicate", seconds=SHORT),
    "transfer fails": partial(disturb, mode="fail", seconds=SHORT),
    "transfer breaks": partial(disturb, mode="break", seconds=SHORT),
    "messages duplicated": partial(messages, mode="duplicate"),
    "messages reordered": partial(messages, mode="reorder"),
    "messages scrambled": partial(messages, mode="scramble"),
    "pool full, in turn": partial(flood, seconds=0.5 * PEER_SECONDS),
    "pool full, for long": partial(flood, seconds=QUEUE_SECONDS + PEER_SECONDS),
    "prefill half alone": partial(half, role="prefill"),
    "decode half alone": partial(half, role="decode"),
    "abort storm": storm,
}
ENDING = frozenset(
    name for name in FAULTS if "killed" in name or "rank stopped, long" in name or "for ever" in name
)
"""Those after which a server is started again."""


def schedule(count: int) -> list[tuple[str, Fault]]:
    """``count`` faults: every kind in turn, and each sixth one an abort, in every state by every client."""
    kinds, made = list(FAULTS.items()), []
    aborts = 0
    for index in range(count):
        if index % 6 == 5:
            state, who = ABORTS[aborts % len(ABORTS)]
            made.append((f"abort {state}: {' + '.join(who)}", partial(abort, state=state, who=who)))
            aborts += 1
        else:
            made.append(kinds[(index - aborts) % len(kinds)])
    return made


async def settle(scene: Scene) -> None:
    """Let every client come to its end."""
    tasks = [task for _, task in scene.asked] + scene.halves
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
