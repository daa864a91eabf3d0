"""A rank process: joins the world, builds its part of the model, proves it in a warm-up, then steps.

Started as ``python -m interlock.engine.worker`` with a ``RankSpec`` as one JSON line on standard input. It
ends when it is told to, when anything fails, or when the launcher, which holds that input open, is gone.
"""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import closing

import msgspec
import torch
import torch.distributed as dist
import zmq

from interlock.engine.disaggregation.start import bind_waker, rank_part, wake_message
from interlock.engine.endpoints import Endpoints, Linked, RankSpec
from interlock.engine.grammar import GrammarGate
from interlock.engine.heartbeat import LAUNCHER_IS_GONE, Activity, heartbeat, watch_launcher
from interlock.engine.load_report import LoadReport
from interlock.engine.messages import RankFailed, RankReady
from interlock.engine.model_runner import ModelRunner
from interlock.engine.rank_loop import FollowerLoop, LeaderLoop, StepChannel
from interlock.engine.receipts import observe_devices, observe_scheduler
from interlock.engine.same_launch import refuse_other_launch
from interlock.engine.scheduler import Scheduler
from interlock.engine.stacks import answer_with_stacks
from interlock.engine.start_clock import StartClock
from interlock.heap import steady_heap
from interlock.logs import configure
from interlock.parallel.launch import Rendezvous, joined_world
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan

logger = logging.getLogger("interlock.engine")

LAUNCH_KEY = "launch"
LAST_WORDS_MS = 2000
CONSEQUENCES = (
    "connection closed",
    "connection reset",
    "socket closed",
    "broken pipe",
    "timed out",
    "timeout",
)


def main() -> None:
    """One rank, told what to be by the first line of standard input."""
    steady_heap()
    told = sys.stdin.buffer.readline()
    if not told.endswith(b"\n"):
        sys.exit(LAUNCHER_IS_GONE)
    spec = msgspec.json.decode(told, type=RankSpec)
    watch_launcher(sys.stdin.fileno())
    answer_with_stacks(spec.stacks)
    configure(spec.plan.log_level, spec.plan.log_format, rank=spec.rank)
    sys.exit(run_rank(spec))


def run_rank(spec: RankSpec) -> int:
    """Run one rank to its end; returns the process's exit code."""
    clock = StartClock(spec.begun)
    torch.set_num_threads(1)
    torch.manual_seed(spec.plan.seed)
    clock.mark("process and imports")
    with closing(_Told(spec)) as told:
        try:
            rendezvous = Rendezvous.open(
                spec.store, rank=spec.rank, size=spec.plan.tp_size, timeout=spec.plan.stall_timeout
            )
            launch = _agree_on_launch(spec, rendezvous)
            told.link(launch.endpoints)
            refuse_other_launch(spec.plan, launch.plan)
            spec = msgspec.structs.replace(spec, plan=launch.plan)
            _run_in_world(spec, launch.endpoints, rendezvous, told, clock)
        except Exception as error:
            told.send(_failure(spec.rank, error))
            return 1
    return 0


def _run_in_world(
    spec: RankSpec, endpoints: Endpoints, rendezvous: Rendezvous, told: _Told, clock: StartClock
) -> None:
    plan = spec.plan
    if plan.device == "cuda":
        torch.cuda.set_device(spec.rank % spec.ranks_on_node // plan.ranks_per_gpu)
    activity = Activity("loading")
    with (
        heartbeat(told.context, endpoints.outputs, spec.rank, activity),
        joined_world(
            rendezvous,
            attn_dp_size=plan.attn_dp_size,
            ep_size=plan.ep_size,
            backend="gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl",
        ) as groups,
        torch.inference_mode(),
    ):
        clock.mark("joining")
        _Rank(spec, groups, rendezvous, activity, clock).run(told.context, endpoints, told.outputs)


class _Told:
    """Those who hear of this rank: the front end, and on other nodes the launcher that started it."""

    def __init__(self, spec: RankSpec) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.setsockopt(zmq.IPV6, 1)
        self.outputs = self._socket()
        self._launcher = self._socket() if spec.reports else None
        self._front_end_is_known = False
        if self._launcher is not None:
            self._launcher.connect(spec.reports)
        if spec.endpoints is not None:
            self._connect(spec.endpoints)

    def link(self, endpoints: Endpoints) -> None:
        """Connect to the front end, and say so to the launcher."""
        if not self._front_end_is_known:
            self._connect(endpoints)
        if self._launcher is not None:
            self._launcher.send(msgspec.msgpack.encode(Linked(endpoints)))

    def send(self, failure: RankFailed) -> None:
        message = msgspec.msgpack.encode(failure)
        if self._front_end_is_known:
            self.outputs.send(message)
        if self._launcher is not None:
            self._launcher.send(message)

    def close(self) -> None:
        self.outputs.close()
        if self._launcher is not None:
            self._launcher.close()
        self.context.term()

    def _connect(self, endpoints: Endpoints) -> None:
        self.outputs.connect(endpoints.outputs)
        self._front_end_is_known = True

    def _socket(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, LAST_WORDS_MS)
        return socket


class _Rank:
    """One rank from building to its end."""

    def __init__(
        self,
        spec: RankSpec,
        groups: Groups,
        rendezvous: Rendezvous,
        activity: Activity,
        clock: StartClock,
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._groups = groups
        self._rendezvous = rendezvous
        self._activity = activity
        self._runner = ModelRunner(spec.plan, groups, clock)
        is_leader = groups.attn_tp.rank == 0
        self._scheduler = Scheduler(spec.plan, replica=groups.attn_dp.rank) if is_leader else None
        self._gate = GrammarGate(spec.plan)
        self._part = rank_part(spec.plan, groups)

    def run(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints, outputs: zmq.Socket[bytes]
    ) -> None:
        try:
            if self._scheduler is not None:
                self._gate.prepare()
            self._runner.load(self._part.storage)
            assert self._runner.cache is not None
            self._part.register(self._runner.cache)
            self._rendezvous.wait_for_all("loaded")
            self._clock.mark("waiting for ranks")
            if self._spec.plan.kernels == "torch":
                torch.set_num_threads(self._spec.plan.threads)
            self._runner.warm_up()
            self._gate.finish_preparing()
            self._groups.world.barrier()
            self._clock.mark("waiting for ranks")
            self._activity.report = LoadReport(self._runner)
            channel = StepChannel(self._groups.attn_tp)
            if self._scheduler is None:
                self._part.start(None, lambda: None)
                self._say_ready(outputs, {})
                FollowerLoop(self._runner, channel, self._activity).run()
                return
            self._lead(self._scheduler, channel, context, endpoints, outputs)
        finally:
            self._gate.close()
            self._part.close()
            self._runner.close()

    def _lead(
        self,
        scheduler: Scheduler,
        channel: StepChannel,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Endpoints,
        outputs: zmq.Socket[bytes],
    ) -> None:
        inputs = context.socket(zmq.PULL)
        inputs.setsockopt(zmq.LINGER, 0)
        inputs.connect(endpoints.inputs[self._groups.attn_dp.rank])
        waker, wake = bind_waker(context, inputs), wake_message()
        try:
            role = self._part.start(scheduler, lambda: waker.send(wake))
            assert role is not None, "a leader has a role"
            loop = LeaderLoop(
                self._runner,
                channel,
                self._activity,
                inputs,
                outputs,
                self._groups.attn_dp,
                scheduler,
                self._gate,
                role,
            )
            self._say_ready(outputs, {**observe_scheduler(scheduler), "overlap_schedule": loop.overlaps})
            loop.run()
        finally:
            self._part.close()
            waker.close()
            inputs.close()

    def _say_ready(self, outputs: zmq.Socket[bytes], of_leader: dict[str, object]) -> None:
        self._clock.mark("starting the loop")
        logger.info("%s", self._clock)
        receipts = {**self._receipts(), **of_leader, "start": self._clock.report()}
        outputs.send(msgspec.msgpack.encode(RankReady(rank=self._spec.rank, receipts=receipts)))

    def _receipts(self) -> dict[str, object]:
        per_node = self._spec.ranks_on_node
        return {
            **self._runner.receipts(),
            **self._part.observed(),
            "stall_timeout": self._rendezvous.timeout,
            **observe_devices(self._spec.plan.device, self._groups.world),
            "nnodes": self._groups.world.size // per_node,
            "node_rank": self._spec.rank // per_node,
        }


class _Launch(msgspec.Struct, frozen=True):
    """What node 0 tells the ranks of other nodes."""

    endpoints: Endpoints
    plan: LaunchPlan


def _agree_on_launch(spec: RankSpec, rendezvous: Rendezvous) -> _Launch:
    """Rank 0 publishes the front end's addresses and its plan; ranks that do not know them wait for them."""
    if spec.endpoints is not None:
        launch = _Launch(spec.endpoints, spec.plan)
        if rendezvous.store is not None and spec.rank == 0:
            rendezvous.store.set(LAUNCH_KEY, msgspec.json.encode(launch).decode())
        return launch
    assert rendezvous.store is not None, "the only rank is beside the front end"
    return msgspec.json.decode(rendezvous.store.get(LAUNCH_KEY), type=_Launch)


def _failure(rank: int, error: Exception) -> RankFailed:
    text = f"{type(error).__name__}: {error}"
    is_consequence = isinstance(error, dist.DistError | RuntimeError) and any(
        phrase in text.lower() for phrase in CONSEQUENCES
    )
    return RankFailed(rank=rank, error=text, details=traceback.format_exc(), is_consequence=is_consequence)


if __name__ == "__main__":
    main()
