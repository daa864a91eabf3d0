"""Dispatch and combine alone, over real rank processes: what is measured, where, and what the figures mean.

A figure is the median over rounds of the slowest rank's time: on a CPU by the clock, on a GPU by the device's
own events. Backends take turns within a round, so that a busy machine hits all of them.

| part | what is timed |
|---|---|
| both | one dispatch and one combine |
| dispatch, combine | each alone, with a barrier before it |
| graph | both, captured in a CUDA graph and replayed; backends that declare it |

| bytes | of |
|---|---|
| logical | a row for each (token, expert), and a result on its way home: what experts take and give |
| link | a row for each (token, other rank that holds one of its experts): the least that must leave a rank |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from interlock.bench.a2a_ranks import PARTS, A2AArm, A2AShape, Measured, Traffic, measure
from interlock.bench.copy_speed import CopySpeed
from interlock.bench.statistics import Figure
from interlock.errors import Refusal
from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.conformance.processes import Gpus, run_ranks
from interlock.moe.terms import Layout, Phase
from interlock.plan.facts import MachineFacts
from interlock.plan.join import Situation, a2a_problem
from interlock.plan.rehearsal import shared_nccl

_USUAL: Final = {Layout.CONTIGUOUS: Phase.PREFILL, Layout.MASKED: Phase.DECODE}
"""The phase in which a layout is used, where a backend has it in both."""


@dataclass(frozen=True, slots=True)
class A2APoint:
    """One part of one arm at ``tokens`` a rank; seconds of the slowest rank in each round.

    Attributes:
        traffic: bytes of a rank, averaged over the ranks.
        ranks_per_gpu: ranks whose bytes go through the memory that ``copies`` was measured on.
        copies: what the device copies at most, measured in the same run.
    """

    backend: str
    layout: str
    tokens: int
    part: str
    figure: Figure
    traffic: Traffic
    copies: CopySpeed
    ranks_per_gpu: int = 1

    @property
    def logical_bandwidth(self) -> float:
        """Bytes a second of a rank's experts."""
        return self.traffic.logical(self.part) / self.figure.median

    @property
    def link_bandwidth(self) -> float:
        """Least bytes a second that left a rank."""
        return self.traffic.link(self.part) / self.figure.median

    @property
    def share_of_copy(self) -> float:
        """Logical bytes, read once and written once by every rank of the device, to what it can copy."""
        return 2 * self.logical_bandwidth * self.ranks_per_gpu / self.copies.device

    @property
    def share_of_link(self) -> float | None:
        """Link bytes to what one GPU copies to another; None with one GPU or on a CPU."""
        return None if self.copies.peer is None else self.link_bandwidth / self.copies.peer


@dataclass(frozen=True, slots=True, kw_only=True)
class A2ARun:
    """What to measure. ``gpus``: None for the CPU."""

    shape: A2AShape
    ranks: int
    tokens: tuple[int, ...]
    rounds: int
    gpus: Gpus | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.gpus is None else "cuda"


SIZES: Final = {
    "cpu": A2AShape(hidden=576, experts=24, top_k=12, dtype="float32"),
    "cuda": A2AShape(hidden=4096, experts=256, top_k=8, dtype="bfloat16"),
}
"""What is exchanged where the user says nothing else: the demo's sizes, and a large model's on a GPU."""
ROW_DTYPES: Final = ("float32", "bfloat16", "fp8")


def shape_of(
    device: str, *, hidden: int | None, experts: int | None, top_k: int | None, dtype: str | None
) -> A2AShape:
    """What to exchange; None is the usual size of ``device``.

    Raises:
        Refusal: more choices than experts, or an unknown dtype.
    """
    usual = SIZES[device]
    shape = A2AShape(
        hidden=hidden or usual.hidden,
        experts=experts or usual.experts,
        top_k=top_k or usual.top_k,
        dtype=dtype or usual.dtype,
    )
    if shape.top_k > shape.experts:
        raise Refusal(
            option="--top-k",
            given=shape.top_k,
            rule=f"a token cannot go to more than {shape.experts} experts",
            alternatives=(f"--top-k {shape.experts}",),
        )
    if shape.dtype not in ROW_DTYPES:
        raise Refusal(
            option="--dtype",
            given=shape.dtype,
            rule=f"is none of {', '.join(ROW_DTYPES)}",
            alternatives=tuple(f"--dtype {name}" for name in ROW_DTYPES),
        )
    return shape


def choose_gpus(device: str | None, ranks: int, ranks_per_gpu: int, facts: MachineFacts) -> Gpus | None:
    """Where the ranks compute: None for the CPU, which is taken where there is no GPU.

    Raises:
        Refusal: an unknown device, too few GPUs, or GPUs that cannot be shared.
    """
    if device not in (None, "cpu", "cuda"):
        raise Refusal(
            option="--device",
            given=device,
            rule="is neither cpu nor cuda",
            alternatives=("--device cpu", "--device cuda"),
        )
    count = len(facts.devices)
    if device == "cpu" or (device is None and not count):
        if ranks_per_gpu > 1:
            raise Refusal(
                option="--ranks-per-gpu",
                given=ranks_per_gpu,
                rule="on a CPU the ranks share the machine without this option",
                alternatives=("--ranks-per-gpu 1",),
            )
        return None
    if ranks % ranks_per_gpu or ranks // ranks_per_gpu > count:
        fewest = -(-ranks // max(1, count))
        raise Refusal(
            option="--ranks-per-gpu",
            given=ranks_per_gpu,
            rule=f"{ranks} ranks cannot be spread {ranks_per_gpu} to a GPU over {count} GPUs; what shares a "
            "GPU is seen to be correct, and its speed means nothing",
            alternatives=(*([f"--ranks-per-gpu {fewest}"] if count else []), "--device cpu"),
        )
    if ranks_per_gpu > 1:
        shared_nccl(facts.nccl, ranks_per_gpu)
    return Gpus(ranks_per_gpu)


def arms_for(run: A2ARun, names: Sequence[str], facts: MachineFacts) -> list[A2AArm]:
    """Every backend and layout that exchanges rows between the ranks of ``run``.

    Raises:
        Refusal: one of ``names`` cannot run here, or none can; each with its reason.
    """
    catalogue = a2a_backends()
    chosen = [catalogue.get(name) for name in names] if names else list(catalogue.entries.values())
    arms, refused = [], {}
    for backend in chosen:
        problem = _problem(backend, run, facts)
        if problem is None:
            arms += _arms_of(backend)
        else:
            refused[backend.name] = problem
    if not arms or (names and refused):
        raise Refusal(
            option="--a2a",
            given=" ".join(names and refused),
            rule="; ".join(f"{name} {problem}" for name, problem in refused.items()),
            alternatives=[f"--a2a {name}" for name in dict.fromkeys(arm.backend for arm in arms)]
            or ["--ranks 2"],
        )
    return arms


def run_a2a(arms: Sequence[A2AArm], run: A2ARun) -> list[A2APoint]:
    """Start the ranks and measure every arm at every number of tokens."""
    if run.gpus is None:
        get_kernels("cpu" if native_cpu_unavailable() is None else "torch", threads=1)
    sharing = run.gpus.per_gpu if run.gpus else 1
    patience = 600.0 * sharing
    measured = run_ranks(
        measure, run.ranks, list(arms), run.shape, list(run.tokens), run.rounds, run.device, sharing,
        gpus=run.gpus, timeout=patience, collective_timeout=patience,
    )  # fmt: skip
    return list(_points(arms, run, measured))


def _points(arms: Sequence[A2AArm], run: A2ARun, measured: list[Measured]) -> list[A2APoint]:
    points = []
    for count in run.tokens:
        traffic = Traffic.mean([rank.traffic[count] for rank in measured])
        for arm in arms:
            for part in PARTS:
                by_rank = [rank.times.get((count, arm.name, part), ()) for rank in measured]
                slowest = tuple(max(each) for each in zip(*by_rank, strict=True))
                if slowest:
                    points.append(
                        A2APoint(
                            arm.backend, arm.layout.value, count, part, Figure(slowest), traffic,
                            measured[0].copies, run.gpus.per_gpu if run.gpus else 1,
                        )
                    )  # fmt: skip
    return points


def _problem(backend: A2ABackend, run: A2ARun, facts: MachineFacts) -> str | None:
    if not _arms_of(backend):
        return "exchanges no rows: every rank holds all tokens"
    shape = run.shape
    here = Situation(
        device=run.device,
        kernels="",
        dtype=shape.rows,
        weight_format=shape.dtype,
        hidden_size=shape.hidden,
        nnodes=1,
        deterministic=False,
        facts=facts,
        local_gpus=-(-run.ranks // (run.gpus.per_gpu if run.gpus else 1)),
        ep_size=run.ranks,
        num_experts=shape.experts,
        top_k=shape.top_k,
    )
    return a2a_problem(backend, here)


def _arms_of(backend: A2ABackend) -> list[A2AArm]:
    """One for each layout, in the phase that it is for where the backend has it there."""
    layouts = {layout for layouts in backend.layouts.values() for layout in layouts} - {Layout.REPLICATED}
    found = []
    for layout in sorted(layouts):
        phases = [phase for phase in Phase if layout in backend.layouts[phase]]
        usual = _USUAL[layout]
        found.append(A2AArm(backend.name, layout, usual if usual in phases else phases[0]))
    return found
