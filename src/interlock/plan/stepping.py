"""How steps reach a device: decode batches captured as CUDA graphs, and steps queued ahead of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from interlock.errors import Refusal
from interlock.moe.terms import Phase
from interlock.nn.attention_backends.base import AttentionBackend
from interlock.options import Options
from interlock.plan.capacity import Limits
from interlock.plan.decided import Decided, asked_integer, asked_text, rule
from interlock.plan.device import Compute
from interlock.plan.disaggregation import PREFILL
from interlock.plan.expert_parallelism import ExpertParallelism
from interlock.plan.topology import World

GRAPH_SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Decode batches with a graph of their own; others run in the next larger one, with padding."""


@dataclass(frozen=True, slots=True)
class Stepping:
    """The items of this module."""

    cuda_graph_sizes: Decided[tuple[int, ...]]
    overlap_schedule: Decided[bool]

    def items(self) -> dict[str, Decided[Any]]:
        return {"cuda_graph_sizes": self.cuda_graph_sizes, "overlap_schedule": self.overlap_schedule}


def decide_stepping(
    options: Options,
    compute: Compute,
    world: World,
    limits: Limits,
    experts: ExpertParallelism,
    attention: AttentionBackend,
    mode: str,
) -> Stepping:
    """Graphs and overlap where nothing stands against them; what was asked for and cannot be is refused.

    Args:
        mode: of disaggregation.
    """
    problem = _no_graphs(compute, world, experts, attention, mode)
    graphs = _graphs(options, world, limits, problem)
    return Stepping(graphs, _overlap(options, compute, world))


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Buckets up to ``largest``, itself included."""
    if largest < 1:
        return ()
    return (*(size for size in GRAPH_SIZES if size < largest), largest)


def _graphs(options: Options, world: World, limits: Limits, problem: str | None) -> Decided[tuple[int, ...]]:
    asked = asked_integer(options, "cuda_graph_max_batch")
    running = limits.max_running_requests.value
    if asked is not None and asked.value:
        if problem is None and asked.value > running:
            problem = f"no batch is larger than {running} (--max-running-requests)"
        if problem is not None:
            raise Refusal(
                option="--cuda-graph-max-batch",
                given=asked.value,
                rule=problem,
                alternatives=["--cuda-graph-max-batch 0", "--cuda-graph-max-batch auto"],
            )
    if asked is not None:
        return Decided(graph_sizes(asked.value), asked.source, asked.reason)
    if problem is not None:
        return rule((), problem)
    if world.attn_dp_size.value > 1:
        return rule((), "no recorded run shows replicas that replay graphs (--cuda-graph-max-batch N to try)")
    largest = min(running, GRAPH_SIZES[-1])
    reason = "every decode batch" if largest == running else "larger batches gain little from a graph"
    return rule(graph_sizes(largest), f"{reason}; --max-running-requests is {running}")


def _no_graphs(
    compute: Compute, world: World, experts: ExpertParallelism, attention: AttentionBackend, mode: str
) -> str | None:
    """Why decode steps cannot be captured; None when they can."""
    backend, runner = experts.backend, experts.runner
    if mode == PREFILL:
        return "a prefill server runs no decode steps (--disaggregation-mode prefill)"
    if compute.device.value != "cuda":
        return f"there are no CUDA graphs on {compute.device.value}"
    if compute.kernels.value != "triton":
        return f"kernels {compute.kernels.value} wait for the device within a step (--kernels triton)"
    if world.attn_dp_size.value > 1 and not backend.uneven_graphs:
        return "attention replicas decode batches of different sizes, and a graph has one (--attn-dp-size 1)"
    if Phase.DECODE not in backend.capturable:
        return f"--moe-a2a-backend {backend.name} cannot be captured"
    if runner is not None and not runner.capturable:
        return f"--moe-runner-backend {runner.name} waits for the device within a step"
    if not attention.capturable:
        return f"--attention-backend {attention.name} cannot be captured"
    return None


def _overlap(options: Options, compute: Compute, world: World) -> Decided[bool]:
    asked = asked_text(options, "overlap_schedule")
    problem = None
    if world.attn_tp_size > 1:
        problem = "the leader of several attention-TP ranks tells the others the tokens of each step"
    elif world.attn_dp_size.value > 1:
        problem = "attention replicas agree on each step after the one before (--attn-dp-size 1)"
    if asked is not None:
        if asked.value == "on" and problem:
            raise Refusal(
                option="--overlap-schedule",
                given="on",
                rule=problem,
                alternatives=["--overlap-schedule off", "--overlap-schedule auto"],
            )
        return Decided(asked.value == "on", asked.source, asked.reason)
    if problem is not None:
        return rule(False, problem)
    if compute.device.value == "cpu":
        return rule(False, "a CPU computes a step when it is launched, so nothing is left to overlap")
    return rule(True, "the device computes while the host makes the next step")
