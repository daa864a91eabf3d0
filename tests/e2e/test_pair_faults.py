"""Faults injected into a prefill and a decode server with all their processes: a few in every run, 300 in the
slow mode.

    pytest -m slow tests/e2e/test_pair_faults.py
    PAIR_FAULTS_REPORT=report.jsonl pytest -m slow tests/e2e/test_pair_faults.py -k 17-

After each fault every client has a whole answer, the right one, or one clear error within its deadline; no
page is held on either side; and the pair answers the next request.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pair.clients import End, ask, bodies
from tests.e2e.pair.cluster import MODEL, SERVE, Cluster
from tests.e2e.pair.episode import Report, episode
from tests.e2e.pair.faults import ENDING, schedule
from tests.e2e.pair.world import namespaces, obstacle, this_machine
from tests.e2e.processes import READY, running

Due = list[tuple[dict[str, Any], End]]
FAULTS = schedule(300)
LASTING = ("long", "silent", "alone")
FEW = [
    number
    for number, (kind, _) in enumerate(FAULTS[:60])
    if kind not in ENDING and not any(word in kind for word in LASTING)
][::5]


@pytest.fixture(scope="module")
def due() -> Due:
    """What one server that does both phases answers."""
    with running([*SERVE, *MODEL, "--kv-memory", "64MiB", "--port", "0"]) as process:
        url = process.wait_for(READY)[1]
        answers = [(body, asyncio.run(ask(url, body, deadline=60))) for body in bodies(24)]
    assert {answer.kind for _, answer in answers} == {"answer"}
    return answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        world = this_machine() if obstacle() else stack.enter_context(namespaces())
        made = Cluster(world, tmp_path_factory.mktemp("pair"))
        stack.callback(made.close)
        made.start()
        yield made


def inject(cluster: Cluster, due: Due, number: int) -> Report:
    kind, fault = FAULTS[number]
    try:
        return episode(cluster, kind, fault, number, due)
    except BaseException:
        cluster.calm()
        for role in cluster.servers:
            print(f"--- {role}\n{cluster.tail(role)}")
            cluster.restart(role)
        cluster.wait_routed()
        raise


@pytest.mark.parametrize("number", FEW, ids=lambda number: f"{number}-{FAULTS[number][0]}")
def test_some_faults(cluster: Cluster, due: Due, number: int) -> None:
    """Cases H03, H05 and H06."""
    inject(cluster, due, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda number: f"{number}-{FAULTS[number][0]}")
def test_three_hundred_faults(cluster: Cluster, due: Due, number: int) -> None:
    report = inject(cluster, due, number)
    if path := os.environ.get("PAIR_FAULTS_REPORT"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"number": number} | report.as_dict()) + "\n")
