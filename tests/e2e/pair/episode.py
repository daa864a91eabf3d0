"""One fault: what clients got, and whether the pair is as good as before."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from tests.e2e.pair.clients import End, ask
from tests.e2e.pair.cluster import FREE_SECONDS, STALL_SECONDS, Cluster
from tests.e2e.pair.faults import DEADLINE_SECONDS, Fault, Scene, settle

END_SECONDS = STALL_SECONDS + 12.0


@dataclass(frozen=True)
class Report:
    """Attributes:
    ends: clients by how they ended.
    errors: what those were told that got one.
    slowest: seconds of the client that waited longest.
    freed: seconds from the last client's end until no page was held.
    """

    kind: str
    ends: dict[str, int]
    errors: list[str]
    slowest: float
    freed: float
    restarted: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def episode(
    cluster: Cluster, kind: str, fault: Fault, seed: int, due: list[tuple[dict[str, Any], End]]
) -> Report:
    """Raises ``AssertionError`` for a client that hangs, is told nothing clear or a wrong answer, for a page
    that is not given back, an orphan, and a pair that does not serve the next request."""
    rng = random.Random(seed)
    ends, dead = asyncio.run(clients(cluster, fault, rng, due))
    begun = time.monotonic()
    for role in sorted(dead):
        wait_ended(cluster, role)
    cluster.calm()
    for role in ("prefill", "decode"):
        assert role in dead or not cluster.has_ended(role), f"the {role} server ended: {cluster.tail(role)}"
        if role not in dead:
            wait_free(cluster, role)
    freed = time.monotonic() - begun
    for role in sorted(dead):
        cluster.restart(role)
    cluster.wait_routed()
    body, answer = rng.choice(due)
    after = asyncio.run(ask(cluster.router, body, deadline=DEADLINE_SECONDS))
    assert after.kind == "answer", f"the next request: {after}"
    assert after.same(answer)
    for role in ("prefill", "decode"):
        wait_free(cluster, role)
    errors = sorted({end.text for end in ends if end.kind == "error"})
    slowest = max((end.seconds for end in ends), default=0.0)
    counts = dict(Counter(end.kind for end in ends))
    return Report(kind, counts, errors, round(slowest, 2), round(freed, 2), sorted(dead))


async def clients(
    cluster: Cluster, fault: Fault, rng: random.Random, due: list[tuple[dict[str, Any], End]]
) -> tuple[list[End], set[str]]:
    """Ask while the fault happens; how each client ended, and which servers are dead."""
    answers = {body["seed"]: answer for body, answer in due}
    scene = Scene(cluster, rng, [body for body, _ in due])
    await fault(scene)
    await settle(scene)
    ends = []
    for body, task in scene.asked:
        end = task.result()
        assert end.kind in ("answer", "error", "gone"), f"{end} for {len(body['prompt'])} tokens"
        if end.kind == "answer":
            assert end.same(answers[body["seed"]]), f"another answer: {end} {answers[body['seed']]}"
        ends.append(end)
    for task in scene.halves:
        assert task.result().kind in ("answer", "error", "gone"), f"the prefill half: {task.result()}"
    return ends, scene.dead


def wait_ended(cluster: Cluster, role: str) -> None:
    """All processes of a server that lost one of them are gone."""
    process = cluster.servers[role].process
    assert process is not None
    process.wait(END_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while orphans := process.survivors():
        assert time.monotonic() < deadline, f"orphans of the {role} server: {orphans}"
        time.sleep(0.05)


def wait_free(cluster: Cluster, role: str) -> None:
    deadline = time.monotonic() + FREE_SECONDS
    while not cluster.is_free(role):
        assert time.monotonic() < deadline, f"{cluster.held(role)} pages of the {role} server are still held"
        time.sleep(0.1)
