"""``interlock serve``: start the engine and answer HTTP until a signal or the engine's end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from interlock.engine.client import Engine
from interlock.engine.rank_processes import RankProcesses
from interlock.errors import EngineDeadError
from interlock.plan.launch_plan import LaunchPlan
from interlock.server.app import create_app
from interlock.server.serve import listen, make_server
from interlock.server.settings import ServerSettings
from interlock.tokenizer import load_tokenizer

logger = logging.getLogger("interlock")
DRAIN_SECONDS = 20


def serve(plan: LaunchPlan, *, api_key: str | None) -> int:
    """Serve ``plan`` until the end; returns the exit code. On nodes beside the first only ranks are run."""
    if plan.node_rank > 0:
        return _run_remote_node(plan)
    return asyncio.run(_serve(plan, api_key))


def local_ranks(plan: LaunchPlan) -> range:
    """The ranks of this node: ``tp_size / nnodes`` consecutive ones."""
    each = plan.tp_size // plan.nnodes
    return range(plan.node_rank * each, (plan.node_rank + 1) * each)


async def _serve(plan: LaunchPlan, api_key: str | None) -> int:
    listener = listen(plan.host, plan.port)
    with closing(listener), _cancelled_by_sigterm():
        engine = await Engine.start(plan, rendezvous=plan.dist_init or None, local_ranks=local_ranks(plan))
        try:
            return await _answer(engine, plan, api_key, listener)
        finally:
            await engine.close()


async def _answer(engine: Engine, plan: LaunchPlan, api_key: str | None, listener: socket.socket) -> int:
    settings = ServerSettings.from_plan(plan, api_key=api_key, generation_config=_generation_config(plan))
    app = create_app(engine, load_tokenizer(plan.model_path), settings)
    server = make_server(app, log_level=plan.log_level, drain_seconds=DRAIN_SECONDS)
    host, port = listener.getsockname()[:2]
    logger.info("ready: http://%s:%d", f"[{host}]" if ":" in host else host, port)
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    dying = asyncio.create_task(engine.wait_dead())
    await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
    if not dying.done():
        dying.cancel()
        return 0
    server.should_exit = server.force_exit = True
    await answering
    raise EngineDeadError(dying.result())


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM cancels the current task, so that a start that is under way cleans up after itself."""
    task = asyncio.current_task()
    assert task is not None, "runs inside a task"
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _generation_config(plan: LaunchPlan) -> dict[str, object]:
    path = Path(plan.model_path) / "generation_config.json"
    if not path.exists():
        return {}
    config: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _run_remote_node(plan: LaunchPlan) -> int:
    """Run this node's ranks until they end; a signal ends them."""
    ranks = RankProcesses(plan, local_ranks(plan), rendezvous=plan.dist_init, endpoints=None)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        while ranks.is_running() and not any(exit.code for exit in ranks.exits()):
            ranks.wait(0.5)
    except KeyboardInterrupt:
        return 0
    finally:
        ranks.close()
    failed = [exit.describe() for exit in ranks.exits() if exit.code]
    for line in failed:
        logger.error(line)
    return 1 if failed else 0
