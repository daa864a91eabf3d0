"""A node beside the first one, and its ranks: told to end at any time, they end in order and quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from interlock.engine import remote_node
from interlock.engine.endpoints import Place
from interlock.engine.heartbeat import LAUNCHER_IS_GONE
from interlock.engine.rank_processes import Exit
from tests.plan.machines import tiny_card
from tests.plans import make_plan


class NoProcesses:
    """Ranks that never begin. A signal comes while they are being started."""

    def __init__(self, *given: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def exits(self) -> list[Exit]:
        return []

    def close(self) -> None:
        pass


def test_a_signal_that_comes_before_the_ranks_are_started_ends_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a handler the signal would end the process at once, and leave its ranks and folder behind."""
    monkeypatch.setattr(remote_node, "RankProcesses", NoProcesses)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the node did not hear the signal"))
    try:
        plan = make_plan(tiny_card(), tp_size=2, nnodes=2, node_rank=1, dist_init="127.0.0.1:9")
        node = remote_node.RemoteNode(plan, Place.of(plan), leave_seconds=1.0)
        assert node.run() == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("first_words", [b"", b'{"plan": {'])
def test_a_rank_whose_launcher_is_gone_before_it_said_what_to_do_ends_quietly(first_words: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "interlock.engine.worker"],
        input=first_words,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (LAUNCHER_IS_GONE, b"", b"")
