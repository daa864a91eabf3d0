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

import uvicorn

from interlock.engine.client import Engine
from interlock.engine.endpoints import Place
from interlock.engine.remote_node import RemoteNode
from interlock.errors import EngineDeadError
from interlock.plan.launch_plan import LaunchPlan
from interlock.server.app import create_app
from interlock.server.serve import listen, make_server
from interlock.server.settings import ServerSettings
from interlock.tokenizer import load_tokenizer

logger = logging.getLogger("interlock")
DRAIN_SECONDS = 20
STOP_SECONDS = 10


def serve(plan: LaunchPlan, *, api_key: str | None, place: Place | None = None) -> int:
    """Serve ``plan`` until the end; returns the exit code. Without rank 0 among them, ranks alone are run.

    Args:
        place: the ranks of this process; by default all those of its node.
    """
    place = place or Place.of(plan)
    if not place.is_first:
        return RemoteNode(plan, place, leave_seconds=DRAIN_SECONDS + STOP_SECONDS).run()
    return asyncio.run(_serve(plan, api_key, place))


async def _serve(plan: LaunchPlan, api_key: str | None, place: Place) -> int:
    listener = listen(plan.host, plan.port)
    with closing(listener), _cancelled_by_sigterm():
        engine = await Engine.start(plan, place=place)
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
    _stop_on_signals(server)
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    dying = asyncio.create_task(engine.wait_dead())
    leaving = asyncio.create_task(engine.wait_leaving())
    await asyncio.wait({answering, dying, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if leaving.done() and not dying.done():
        logger.info("node %d was told to end: running requests may finish", leaving.result())
        server.should_exit = True
        await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not dying.done():
        dying.cancel()
        return 0
    server.should_exit = server.force_exit = True
    await answering
    raise EngineDeadError(dying.result())


def _stop_on_signals(server: uvicorn.Server) -> None:
    """From now on a signal lets running requests finish, which is an orderly end.

    The server catches signals itself, and raises them again when it is done.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)


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
