"""The first sign of life comes before anything can stall."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq

from interlock.engine import heartbeat as module
from interlock.engine.messages import Heartbeat


def test_the_first_beat_does_not_wait_for_a_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 3600)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/out"
    with context.socket(zmq.PULL) as outputs:
        outputs.bind(address)
        outputs.setsockopt(zmq.RCVTIMEO, 10_000)
        with module.heartbeat(context, address, rank=3, activity=module.Activity("loading")):
            beat = msgspec.msgpack.decode(outputs.recv(), type=Heartbeat)
    context.term()
    assert (beat.rank, beat.activity, beat.iteration) == (3, "loading", 0)
