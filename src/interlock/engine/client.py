"""The front end's handle on a running engine: starts the ranks, streams tokens, notices death and stalls."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from interlock.engine.disaggregation.wire import replica_of
from interlock.engine.endpoints import (
    Endpoints,
    Place,
    local_endpoints,
    network_endpoints,
    socket_directory,
)
from interlock.engine.load_history import LoadHistory
from interlock.engine.messages import (
    AbortRequest,
    AddRequest,
    AddRequests,
    EngineEnded,
    EngineOutputs,
    FlushCache,
    FromEngine,
    Heartbeat,
    NodeLeaving,
    RankEnded,
    RankFailed,
    RankLoad,
    RankReady,
    RecordSteps,
    SchedulerStats,
    Shutdown,
    StepRecord,
    ToEngine,
    TokenDelta,
    Wake,
)
from interlock.engine.outbox import Outbox
from interlock.engine.rank_processes import RankProcesses
from interlock.engine.rank_watch import RankWatch
from interlock.errors import EngineDeadError, RequestError, StartupError
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.receipts import check

LAST_NEWS_MS = 1000


class Engine:
    """An engine that serves requests; see ``EngineClient`` for the promises of its methods.

    Use ``await Engine.start(plan)``; all methods belong to the event loop that started it.

    Attributes:
        plan: the launch plan.
        receipts: rank -> plan item -> what that rank observed, complete once started.
        history: load of the last minutes.
    """

    def __init__(self, plan: LaunchPlan, endpoints: Endpoints, ranks: RankProcesses, directory: Path) -> None:
        self.plan = plan
        self.receipts: dict[int, dict[str, object]] = {}
        self._ranks = ranks
        self._directory = directory
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.IPV6, 1)
        self._inputs = [self._bind(zmq.PUSH, address) for address in endpoints.inputs]
        self._outputs = self._bind(zmq.PULL, endpoints.outputs)
        self._news = self._bind(zmq.PUB, endpoints.news)
        self._outboxes = [Outbox(partial(self._submit, replica)) for replica in range(plan.attn_dp_size)]
        self._queues: dict[str, asyncio.Queue[TokenDelta | EngineDeadError]] = {}
        self._replica_of: dict[str, int] = {}
        self._load = [0] * plan.attn_dp_size
        self._stats = [SchedulerStats(replica=replica) for replica in range(plan.attn_dp_size)]
        self._watched = RankWatch(plan, ranks)
        self._leaving_node = 0
        self._leaving = asyncio.Event()
        self._failure: str | None = None
        self.history = LoadHistory()
        self._refusal = ""
        self._closing = False
        self._step_listener: Callable[[int, StepRecord], None] | None = None
        self._all_ready = asyncio.Event()
        self._dead = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @staticmethod
    async def start(plan: LaunchPlan, *, place: Place | None = None) -> Engine:
        """Start the ranks of this process and wait until every rank is ready and its receipts agree.

        Args:
            place: ranks to start here, rank 0 among them; by default those that the plan puts on node 0.
                The other nodes start theirs with ``engine.remote_node``.

        Raises:
            StartupError: a rank failed, or a plan item has a missing or differing receipt.
        """
        place = place or Place.of(plan)
        if not place.is_first:
            raise StartupError(
                f"--node-rank {plan.node_rank}: requests are answered on node 0; here run "
                "`interlock serve` with the same options, which starts the ranks of this node"
            )
        store = place.resolved_store()
        directory = socket_directory()
        try:
            if plan.nnodes == 1:
                endpoints = local_endpoints(plan.attn_dp_size, directory)
            else:
                endpoints = network_endpoints(plan.attn_dp_size, store.address)
            ranks = RankProcesses(plan, place, store=store, endpoints=endpoints)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        engine = Engine(plan, endpoints, ranks, directory)
        engine._tasks = [asyncio.create_task(engine._receive()), asyncio.create_task(engine._watch())]
        try:
            await engine._until_ready()
        except BaseException:
            await engine.close()
            raise
        return engine

    def _send_soon(self, replica: int, message: ToEngine) -> None:
        """Send without waiting. The socket keeps what it cannot send yet (a rank may say that it is ready
        before its connection is up); there is no limit."""
        self._outboxes[replica].flush()
        self._inputs[replica].send(self._encoder.encode(message))

    async def stream(self, request: AddRequest, *, replica: int | None = None) -> AsyncIterator[TokenDelta]:
        """See ``EngineClient``. ``replica``: who computes it; by default the one with the least load."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        if request.request_id in self._queues:
            raise RequestError(f"a request with the id {request.request_id!r} is still running")
        queue: asyncio.Queue[TokenDelta | EngineDeadError] = asyncio.Queue()
        if replica is None and request.meeting and self.plan.disaggregation_mode == "prefill":
            replica = replica_of((request.meeting.room, request.meeting.choice), len(self._load))
        if replica is None:
            replica = min(range(len(self._load)), key=self._load.__getitem__)
        self._queues[request.request_id] = queue
        self._replica_of[request.request_id] = replica
        self._load[replica] += 1
        is_finished = False
        try:
            self._outboxes[replica].add(request)
            while True:
                item = await queue.get()
                if isinstance(item, EngineDeadError):
                    raise item
                is_finished = item.finish_reason is not None
                yield item
                if is_finished:
                    return
        finally:
            if self._failure is None and not is_finished:
                self._send_soon(replica, AbortRequest(request_id=request.request_id))
            self._forget(request.request_id)

    async def abort(self, request_id: str) -> None:
        replica = self._replica_of.get(request_id)
        if replica is not None:
            await self._send(replica, AbortRequest(request_id=request_id))

    async def abort_all(self) -> None:
        """Ask for the end of every request; each stream still yields its last delta."""
        for request_id in list(self._replica_of):
            await self.abort(request_id)

    async def flush_cache(self) -> None:
        for replica in range(len(self._inputs)):
            await self._send(replica, FlushCache())

    async def record_steps(self, listener: Callable[[int, StepRecord], None] | None) -> None:
        """Have ``listener(replica, record)`` called for every step from now on; None ends it."""
        self._step_listener = listener
        for replica in range(len(self._inputs)):
            await self._send(replica, RecordSteps(on=listener is not None))

    @property
    def stacks(self) -> str:
        """After a stall, where the ranks of this node were; too much for clients, so not in ``health``."""
        return self._watched.stacks

    def health(self) -> str | None:
        return self._failure

    def stats(self) -> tuple[SchedulerStats, ...]:
        return tuple(self._stats)

    async def wait_dead(self) -> str:
        """Wait for the end of the engine; returns its first error, "" when it was closed."""
        await self._dead.wait()
        return self._failure or ""

    async def wait_leaving(self) -> int:
        """Wait until another node is told to end; returns its number. Its ranks go on until ``close``."""
        await self._leaving.wait()
        return self._leaving_node

    def process_ids(self) -> dict[int, int]:
        """Rank -> process id of the ranks of this node."""
        return self._ranks.process_ids()

    async def close(self) -> None:
        """Stop the ranks and free sockets; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._watched.stop()
        await self._tell_news()
        if self._failure is None and self._all_ready.is_set():
            for replica in range(len(self._inputs)):
                with suppress(zmq.ZMQError, TimeoutError):
                    await asyncio.wait_for(self._send(replica, Shutdown()), timeout=1)
            await asyncio.to_thread(self._ranks.wait, 3.0)
        await asyncio.to_thread(self._ranks.close)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for outbox in self._outboxes:
            outbox.discard()
        self._fail_requests("the server is shutting down")
        self._dead.set()
        self._news.close(linger=LAST_NEWS_MS)
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _submit(self, replica: int, message: AddRequest | AddRequests) -> None:
        """What an outbox sends; other replicas are told to take part."""
        self._send_soon(replica, message)
        for other in range(len(self._inputs)):
            if other != replica:
                self._send_soon(other, Wake())

    async def _send(self, replica: int, message: ToEngine) -> None:
        self._outboxes[replica].flush()
        await self._inputs[replica].send(self._encoder.encode(message))

    def _forget(self, request_id: str) -> None:
        replica = self._replica_of.pop(request_id, None)
        self._queues.pop(request_id, None)
        if replica is not None:
            self._load[replica] -= 1

    async def _receive(self) -> None:
        while True:
            self._handle(self._decoder.decode(await self._outputs.recv()))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case EngineOutputs():
                self._stats[message.replica] = message.stats
                self.history.note_stats(self._stats)
                if message.step is not None and self._step_listener is not None:
                    self._step_listener(message.replica, message.step)
                for delta in message.deltas:
                    queue = self._queues.get(delta.request_id)
                    if queue is not None:
                        queue.put_nowait(delta)
            case Heartbeat() | RankFailed() | RankEnded():
                self._watched.note(message)
            case RankLoad():
                self.history.note_rank(message)
            case RankReady():
                self.receipts[message.rank] = message.receipts
                if len(self.receipts) == self.plan.tp_size:
                    self._all_ready.set()
            case NodeLeaving():
                self._leaving_node = message.node_rank
                self._leaving.set()

    async def _watch(self) -> None:
        reason = await self._watched.first_error()
        if reason:
            await self._die(reason)

    async def _die(self, reason: str) -> None:
        self._failure = reason
        self._fail_requests(reason)
        self._dead.set()
        await self._tell_news()
        await asyncio.to_thread(self._ranks.close)

    async def _tell_news(self) -> None:
        """Tell the launchers of other ranks how it ends: all is well, or the first error."""
        reason = self._failure or self._refusal
        message = EngineEnded(reason=reason, is_stall=self._watched.is_stall)
        await self._news.send(msgspec.msgpack.encode(message))

    def _fail_requests(self, reason: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(EngineDeadError(reason))

    async def _until_ready(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._all_ready, self._dead, self._leaving)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if self._failure is not None:
            told = ("the engine did not start", self._failure, self.stacks)
            raise StartupError("\n".join(filter(None, told)))
        if not self._all_ready.is_set():
            self._refusal = f"node {self._leaving_node} was told to end while the engine started"
        else:
            self._refusal = "\n".join(str(mismatch) for mismatch in check(self.plan, self.receipts))
        if self._refusal:
            raise StartupError(self._refusal)

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket
