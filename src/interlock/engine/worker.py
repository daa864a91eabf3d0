"""A rank process: joins the world, builds its part of the model, proves it in a warm-up, then steps.

Started as ``python -m interlock.engine.worker`` with a ``RankSpec`` as one JSON line on standard input. It
ends when it is told to, when anything fails, or when the launcher, which holds that input open, is gone.
"""

from __future__ import annotations

import sys
import traceback

import msgspec
import torch
import torch.distributed as dist
import zmq

from interlock.engine.endpoints import Endpoints, RankSpec
from interlock.engine.heartbeat import Activity, heartbeat, watch_launcher
from interlock.engine.messages import RankFailed, RankReady
from interlock.engine.model_runner import ModelRunner
from interlock.engine.rank_loop import FollowerLoop, LeaderLoop, StepChannel
from interlock.engine.receipts import observe_scheduler
from interlock.engine.scheduler import Scheduler
from interlock.parallel.launch import Rendezvous, joined_world
from interlock.parallel.topology import Groups

ENDPOINTS_KEY = "interlock/endpoints"
CONSEQUENCES = (
    "connection closed",
    "connection reset",
    "socket closed",
    "broken pipe",
    "timed out",
    "timeout",
)


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSpec)
    watch_launcher(sys.stdin.fileno())
    sys.exit(run_rank(spec))


def run_rank(spec: RankSpec) -> int:
    """Run one rank to its end; returns the process's exit code."""
    plan = spec.plan
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    rendezvous = Rendezvous.open(
        spec.rendezvous, rank=spec.rank, size=plan.tp_size, timeout=plan.stall_timeout
    )
    endpoints = _agree_on_endpoints(spec.endpoints, rendezvous)
    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.setsockopt(zmq.LINGER, 2000)
    outputs.connect(endpoints.outputs)
    activity = Activity("loading")
    backend = "gloo" if plan.device == "cpu" else "nccl"
    try:
        with (
            heartbeat(context, endpoints.outputs, spec.rank, activity),
            joined_world(
                rendezvous, attn_dp_size=plan.attn_dp_size, ep_size=plan.ep_size, backend=backend
            ) as groups,
            torch.inference_mode(),
        ):
            _Rank(spec, groups, rendezvous, activity).run(context, endpoints, outputs)
    except Exception as error:
        outputs.send(msgspec.msgpack.encode(_failure(spec.rank, error)))
        return 1
    finally:
        outputs.close()
        context.term()
    return 0


class _Rank:
    """One rank from building to its end."""

    def __init__(self, spec: RankSpec, groups: Groups, rendezvous: Rendezvous, activity: Activity) -> None:
        self._spec = spec
        self._groups = groups
        self._rendezvous = rendezvous
        self._activity = activity
        self._runner = ModelRunner(spec.plan, groups)
        is_leader = groups.attn_tp.rank == 0
        self._scheduler = Scheduler(spec.plan, replica=groups.attn_dp.rank) if is_leader else None

    def run(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints, outputs: zmq.Socket[bytes]
    ) -> None:
        try:
            self._runner.load()
            if self._spec.plan.kernels == "torch":
                torch.set_num_threads(self._spec.plan.threads)
            self._runner.warm_up()
            self._groups.world.barrier()
            outputs.send(msgspec.msgpack.encode(RankReady(rank=self._spec.rank, receipts=self._receipts())))
            channel = StepChannel(self._groups.attn_tp)
            if self._scheduler is None:
                FollowerLoop(self._runner, channel, self._activity).run()
                return
            inputs = context.socket(zmq.PULL)
            inputs.setsockopt(zmq.LINGER, 0)
            inputs.connect(endpoints.inputs[self._groups.attn_dp.rank])
            try:
                LeaderLoop(
                    self._runner,
                    channel,
                    self._activity,
                    inputs,
                    outputs,
                    self._groups.attn_dp,
                    self._scheduler,
                ).run()
            finally:
                inputs.close()
        finally:
            self._runner.close()

    def _receipts(self) -> dict[str, object]:
        per_node = self._spec.ranks_on_node
        return {
            **self._runner.receipts(),
            **(observe_scheduler(self._scheduler) if self._scheduler else {}),
            "stall_timeout": self._rendezvous.timeout,
            "nnodes": self._groups.world.size // per_node,
            "node_rank": self._spec.rank // per_node,
        }


def _agree_on_endpoints(known: Endpoints | None, rendezvous: Rendezvous) -> Endpoints:
    """Ranks beside the front end publish its addresses; ranks on other nodes wait for them."""
    if rendezvous.store is None:
        assert known is not None, "the only rank is beside the front end"
        return known
    if known is not None:
        rendezvous.store.set(ENDPOINTS_KEY, msgspec.json.encode(known).decode())
        return known
    return msgspec.json.decode(rendezvous.store.get(ENDPOINTS_KEY), type=Endpoints)


def _failure(rank: int, error: Exception) -> RankFailed:
    text = f"{type(error).__name__}: {error}"
    is_consequence = isinstance(error, dist.DistError | RuntimeError) and any(
        phrase in text.lower() for phrase in CONSEQUENCES
    )
    return RankFailed(rank=rank, error=text, details=traceback.format_exc(), is_consequence=is_consequence)


if __name__ == "__main__":
    main()
