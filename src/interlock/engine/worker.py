"""A rank process: joins the world, builds its part of the model, proves it in a warm-up, then steps.

Started as ``python -m interlock.engine.worker`` with a ``RankSpec`` as one JSON line on standard input. It
ends when it is told to, when anything fails, or when the launcher is gone.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist
import zmq

from interlock.engine.endpoints import Endpoints, RankSpec
from interlock.engine.heartbeat import Activity, heartbeat, watch_launcher
from interlock.engine.messages import RankFailed, RankReady
from interlock.engine.model_runner import ModelRunner
from interlock.engine.rank_loop import FollowerLoop, LeaderLoop, StepChannel
from interlock.parallel.launch import Rendezvous, joined_world
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan

ENDPOINTS_KEY = "interlock/endpoints"
CONSEQUENCES = ("connection closed", "connection reset", "socket closed", "broken pipe", "timed out", "timeout")


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSpec)
    sys.exit(run_rank(spec))


def run_rank(spec: RankSpec) -> int:
    """Run one rank to its end; returns the process's exit code."""
    plan = spec.plan
    if spec.stop_at_end_of_input:
        watch_launcher(sys.stdin.fileno())
    torch.set_num_threads(1 if plan.kernels != "torch" else plan.threads)
    torch.manual_seed(plan.seed)
    rendezvous = Rendezvous.open(spec.rendezvous, rank=spec.rank, size=plan.tp_size, timeout=plan.stall_timeout)
    endpoints = _agree_on_endpoints(spec.endpoints, rendezvous)
    context = zmq.Context()
    activity = Activity("loading")
    outputs = context.socket(zmq.PUSH)
    outputs.setsockopt(zmq.LINGER, 2000)
    outputs.connect(endpoints.outputs)
    try:
        with heartbeat(context, endpoints.outputs, spec.rank, activity), _joined(spec, rendezvous) as groups:
            _serve(spec, groups, endpoints, context, outputs, activity)
    except Exception as error:
        outputs.send(msgspec.msgpack.encode(_failure(spec.rank, error)))
        return 1
    finally:
        outputs.close()
        context.term()
    return 0


def _serve(
    spec: RankSpec,
    groups: Groups,
    endpoints: Endpoints,
    context: zmq.Context[zmq.Socket[bytes]],
    outputs: zmq.Socket[bytes],
    activity: Activity,
) -> None:
    plan = spec.plan
    with torch.inference_mode():
        runner = ModelRunner(plan, groups)
        try:
            runner.load()
            runner.warm_up()
            groups.world.barrier()
            outputs.send(
                msgspec.msgpack.encode(RankReady(rank=spec.rank, receipts=runner.receipts()))
            )
            channel = StepChannel(groups.attn_tp)
            if groups.attn_tp.rank > 0:
                FollowerLoop(runner, channel, activity).run()
                return
            replica = groups.attn_dp.rank
            inputs = context.socket(zmq.PULL)
            inputs.setsockopt(zmq.LINGER, 0)
            inputs.connect(endpoints.inputs[replica])
            try:
                LeaderLoop(runner, channel, activity, inputs, outputs, groups.attn_dp).run()
            finally:
                inputs.close()
        finally:
            runner.close()


@contextmanager
def _joined(spec: RankSpec, rendezvous: Rendezvous) -> Iterator[Groups]:
    plan = spec.plan
    with joined_world(
        rendezvous,
        attn_dp_size=plan.attn_dp_size,
        ep_size=plan.ep_size,
        backend="gloo" if plan.device == "cpu" else "nccl",
    ) as groups:
        yield groups


def _agree_on_endpoints(known: Endpoints | None, rendezvous: Rendezvous) -> Endpoints:
    """Ranks beside the front end publish its addresses; ranks on other nodes wait for them."""
    if rendezvous.store is None:
        assert known is not None
        return known
    if known is not None:
        rendezvous.store.set(ENDPOINTS_KEY, msgspec.json.encode(known).decode())
        return known
    return msgspec.json.decode(rendezvous.store.get(ENDPOINTS_KEY), type=Endpoints)


def _failure(rank: int, error: Exception) -> RankFailed:
    text = f"{type(error).__name__}: {error}"
    is_consequence = isinstance(error, (dist.DistError, RuntimeError)) and any(
        phrase in text.lower() for phrase in CONSEQUENCES
    )
    return RankFailed(
        rank=rank, error=text, details=traceback.format_exc(), is_consequence=is_consequence
    )


if __name__ == "__main__":
    main()
