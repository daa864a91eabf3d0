"""A server whose rank fails ends as a whole, with the first error on top, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from interlock.demo.tiny import write_tiny
from interlock.demo.tiny_spec import TinySpec
from interlock.engine.client import Engine
from interlock.engine.messages import AddRequest, SamplingParams
from interlock.errors import EngineDeadError, StartupError
from interlock.launch import plan_launch
from interlock.options import Options
from interlock.plan.launch_plan import LaunchPlan
from tests.engine.conftest import BASE

END_SECONDS = 10
LONG_ANSWER = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def make(folder: Path, **options: object) -> LaunchPlan:
    return plan_launch(str(folder), Options.of(**{**BASE, "stall_timeout": 4, **options}))


def living_children() -> set[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return {child for child in children if child.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No orphan process and no socket directory (shared memory has no name that could be left)."""
    before = living_children()
    with tempfile.TemporaryDirectory(prefix="il-") as scratch:
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        yield
        assert not os.listdir(scratch)
    assert not living_children() - before


async def consume(engine: Engine) -> int:
    request = AddRequest(request_id=uuid.uuid4().hex, token_ids=(5, 6, 7), sampling=LONG_ANSWER)
    count = 0
    async for delta in engine.stream(request):
        count += len(delta.token_ids)
    return count


def test_an_engine_whose_ranks_have_just_gone_is_closed(tiny: Path) -> None:
    """Before anybody has seen that they are gone, and though none takes a message any more."""

    async def check() -> None:
        engine = await Engine.start(make(tiny))
        (pid,) = engine.process_ids().values()
        os.kill(pid, signal.SIGKILL)
        psutil.Process(pid).wait(5)
        time.sleep(0.2)  # the loop stands still: no verdict yet
        await engine.close()

    asyncio.run(check())


async def fail_while_serving(plan: LaunchPlan, victim: int, action: signal.Signals, delay: float) -> str:
    """Start, load the engine, hit one rank; returns what every client and ``health`` were told."""
    engine = await Engine.start(plan)
    try:
        clients = [asyncio.create_task(consume(engine)) for _ in range(4)]
        await asyncio.sleep(delay)
        os.kill(engine.process_ids()[victim], action)
        reason = await asyncio.wait_for(engine.wait_dead(), END_SECONDS + plan.stall_timeout)
        assert engine.health() == reason
        for client in clients:
            with suppress(EngineDeadError):
                await client
        with pytest.raises(EngineDeadError):
            await consume(engine)
    finally:
        start = time.monotonic()
        await engine.close()
        assert time.monotonic() - start < END_SECONDS
    return reason


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("backend", ["none", "shared_memory"])
def test_killed_rank_ends_the_server_and_is_named_first(tiny: Path, victim: int, backend: str) -> None:
    plan = make(tiny, tp_size=2, moe_a2a_backend=backend)
    reason = asyncio.run(fail_while_serving(plan, victim, signal.SIGKILL, 0.1))
    assert reason.splitlines()[0] == f"rank {victim} was killed by SIGKILL"


def test_stalled_rank_ends_the_server_and_is_named_first(tiny: Path) -> None:
    plan = make(tiny, tp_size=2, moe_a2a_backend="collective")
    reason = asyncio.run(fail_while_serving(plan, 1, signal.SIGSTOP, 0.1))
    assert "rank 1" in reason.splitlines()[0]
    assert "silent" in reason.splitlines()[0]


def test_rank_that_fails_while_loading_stops_the_start_with_its_error(tmp_path: Path) -> None:
    """J01: a checkpoint fault is told as such, not as the broken connection of another rank."""
    folder = tmp_path / "model"
    write_tiny(folder, TinySpec())
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["model.layers.3.mlp.experts.6.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(StartupError, match=r"layers\.3\.mlp\.experts\.6\.up_proj"):
        asyncio.run(Engine.start(make(folder, tp_size=2, moe_a2a_backend="collective")))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_faults_never_hang_and_never_leave_orphans(tiny: Path, seed: int) -> None:
    dice = random.Random(seed)
    options = dice.choice(
        [
            {"tp_size": 2},
            {"tp_size": 2, "moe_a2a_backend": "collective"},
            {"tp_size": 2, "moe_a2a_backend": "shared_memory"},
            {"tp_size": 2, "attn_dp_size": 2, "moe_a2a_backend": "shared_memory"},
            {"tp_size": 4, "attn_dp_size": 2, "moe_a2a_backend": "collective"},
        ]
    )
    plan = make(tiny, **options)
    victim = dice.randrange(plan.tp_size)
    action = dice.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV])
    reason = asyncio.run(fail_while_serving(plan, victim, action, dice.uniform(0, 1.5)))
    assert f"rank {victim}" in reason.splitlines()[0]
