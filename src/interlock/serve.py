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
from interlock.engine.endpoints import Place
from interlock.engine.remote_node import RemoteNode
from interlock.errors import EngineDeadError
from interlock.heap import steady_heap
from interlock.logs import fields
from interlock.plan.launch_plan import LaunchPlan
from interlock.server.app import create_app
from interlock.server.gate import Gate
from interlock.server.serve import listen, make_server
from interlock.server.settings import ServerSettings
from interlock.server.tracing import open_tracer
from interlock.tokenizer import load_tokenizer

logger = logging.getLogger("interlock")
STOP_SECONDS = 10
FLUSH_SECONDS = 1


def serve(plan: LaunchPlan, *, api_key: str | None, place: Place | None = None) -> int:
    """Serve ``plan`` until the end; returns the exit code. Without rank 0 among them, ranks alone are run.

    Args:
        place: the ranks of this process; by default all those of its node.
    """
    steady_heap()
    place = place or Place.of(plan)
    if not place.is_first:
        return RemoteNode(plan, place, leave_seconds=plan.drain_timeout + STOP_SECONDS).run()
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
    with closing(open_tracer(plan)) as tracer:
        app = create_app(engine, load_tokenizer(plan.model_path), settings, tracer=tracer)
        server = make_server(app, cut_seconds=FLUSH_SECONDS)
        signals = _Signals()
        answering = asyncio.create_task(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        logger.info("ready: http://%s:%d", f"[{host}]" if ":" in host else host, port)
        gate: Gate = app.state.context.gate
        preparing = asyncio.create_task(app.state.context.grammars.prepare())
        code = await _until_end(engine, gate, answering, plan.drain_timeout, signals)
        if code:
            server.force_exit = True
            server.config.timeout_graceful_shutdown = 0
        server.should_exit = True
        await answering
        preparing.cancel()
        app.state.context.grammars.close()
    if (reason := engine.health()) is not None:
        raise EngineDeadError("\n".join(filter(None, (reason, engine.stacks))))
    return code


async def _until_end(
    engine: Engine, gate: Gate, answering: asyncio.Task[None], drain_timeout: float, signals: _Signals
) -> int:
    """Wait until the server is to end, and let running requests finish where that is possible.

    Returns 0 for an orderly end, also of a dead engine, else 128 + the number of the second signal.
    """
    dying = asyncio.create_task(engine.wait_dead())
    forced = asyncio.create_task(signals.second())
    leaving = asyncio.create_task(engine.wait_leaving())
    told = asyncio.create_task(signals.first())
    try:
        await asyncio.wait({answering, dying, leaving, told}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done() or answering.done():
            return 0
        gate.close(drain_timeout)
        who = "a signal came" if told.done() else f"node {leaving.result()} was told to end"
        logger.info(
            "%s: new requests are refused, running ones may finish",
            who,
            extra=fields(in_flight=gate.in_flight, drain_timeout=drain_timeout),
        )
        idle = asyncio.create_task(gate.wait_idle(drain_timeout))
        await asyncio.wait({dying, idle, forced}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if forced.done():
            logger.warning("a second signal came: ending at once", extra=fields(in_flight=gate.in_flight))
            return 128 + forced.result()
        if gate.in_flight and not dying.done():
            logger.warning("--drain-timeout is over: aborting", extra=fields(in_flight=gate.in_flight))
            await engine.abort_all()
        return 0
    finally:
        for task in (dying, forced, leaving, told):
            task.cancel()


class _Signals:
    """SIGTERM and SIGINT from now on: the first asks for the end, the second insists on it."""

    def __init__(self) -> None:
        self._events = (asyncio.Event(), asyncio.Event())
        self._numbers: list[int] = []
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note, number)

    def _note(self, number: int) -> None:
        if len(self._numbers) < len(self._events):
            self._events[len(self._numbers)].set()
            self._numbers.append(number)

    async def first(self) -> int:
        """Wait for the first signal; returns its number."""
        await self._events[0].wait()
        return self._numbers[0]

    async def second(self) -> int:
        """Wait for the second signal; returns its number."""
        await self._events[1].wait()
        return self._numbers[1]


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
