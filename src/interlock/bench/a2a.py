"""Dispatch and combine alone, over real rank processes on this machine's CPU.

A figure is the median over rounds of the slowest rank's time. Backends take turns within a round, so that a
busy machine hits all of them. "both" is one dispatch and one combine with an expert that returns its rows;
"dispatch" and "combine" are timed with a barrier before each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlock.bench.statistics import Figure
from interlock.errors import Refusal
from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.base import Dispatcher, DispatcherSpec
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.conformance.processes import run_ranks
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from interlock.plugins import load_symbol

WARM_UP = 20
PARTS = ("both", "dispatch", "combine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Times = dict[int, dict[str, dict[str, list[float]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class A2AShape:
    """What is exchanged: rows of ``hidden`` channels, each to ``top_k`` of ``experts``."""

    hidden: int
    experts: int
    top_k: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class A2APoint:
    """One backend and layout at ``tokens`` a rank; seconds of the slowest rank in each round."""

    backend: str
    layout: str
    tokens: int
    part: str
    figure: Figure


def arms_for(ranks: int, names: Sequence[str]) -> list[tuple[str, str]]:
    """(backend, layout) of every backend that exchanges rows between ``ranks`` ranks on this CPU.

    Raises:
        Refusal: one of ``names`` cannot run here, or none can.
    """
    catalogue = a2a_backends()
    chosen = [catalogue.get(name) for name in names] if names else list(catalogue.entries.values())
    native = native_cpu_unavailable()
    arms, refused = [], []
    for backend in chosen:
        layouts = [each for each in sorted(backend.layouts[Phase.DECODE]) if each is not Layout.REPLICATED]
        fits = backend.min_ranks <= ranks <= (backend.max_ranks or ranks)
        if "cpu" in backend.devices and layouts and fits and not (backend.native and native):
            arms += [(backend.name, layout.value) for layout in layouts]
        else:
            refused.append(backend.name)
    if not arms or (names and refused):
        raise Refusal(
            option="--a2a",
            given=" ".join(refused),
            rule=f"exchanges no rows between {ranks} ranks on this CPU",
            alternatives=[f"--a2a {name}" for name in dict.fromkeys(name for name, _ in arms)]
            or ["--ranks 2"],
        )
    return arms


def run_a2a(
    arms: Sequence[tuple[str, str]], shape: A2AShape, ranks: int, tokens: Sequence[int], rounds: int
) -> list[A2APoint]:
    """Start ``ranks`` processes and measure every arm at every number of tokens."""
    get_kernels("cpu" if native_cpu_unavailable() is None else "torch", threads=1)
    measured = run_ranks(measure, ranks, list(arms), shape, list(tokens), rounds)
    points = []
    for count in tokens:
        for name, layout in arms:
            for part in PARTS:
                by_rank = [times[count][f"{name} {layout}"][part] for times in measured]
                slowest = tuple(max(each) for each in zip(*by_rank, strict=True))
                points.append(A2APoint(name, layout, count, part, Figure(slowest)))
    return points


def build(name: str, layout: Layout, groups: Groups, shape: A2AShape, capacity: int) -> Dispatcher:
    """One dispatcher; kernels are the fast ones where they can be built."""
    spec = DispatcherSpec(
        groups=groups,
        experts=place(shape.experts, groups.ep.size),
        rank=groups.ep.rank,
        num_experts=shape.experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden,
        row_dtype=shape.dtype,
        dtype=DTYPES[shape.dtype],
        device=torch.device("cpu"),
        layouts=dict.fromkeys(Phase, layout),
        capacity=dict.fromkeys(Phase, capacity),
        kernels=get_kernels("cpu" if native_cpu_unavailable() is None else "torch", threads=1),
    )
    dispatcher: Dispatcher = load_symbol(a2a_backends().get(name).dispatcher)(spec)
    return dispatcher


def measure(
    groups: Groups, arms: Sequence[tuple[str, str]], shape: A2AShape, tokens: Sequence[int], rounds: int
) -> Times:
    """tokens -> arm -> part -> seconds of each round on this rank. Runs in every rank process."""
    torch.use_deterministic_algorithms(False)  # the suites' processes fill fresh tensors with NaN
    dispatchers = {
        f"{name} {layout}": build(name, Layout(layout), groups, shape, max(tokens)) for name, layout in arms
    }
    generator = torch.Generator().manual_seed(groups.ep.rank)
    times: Times = {}
    for count in tokens:
        x = torch.randn(count, shape.hidden, generator=generator).to(DTYPES[shape.dtype])
        scores = torch.rand(count, shape.experts, generator=generator)
        ids = scores.argsort(dim=1)[:, : shape.top_k].sort(dim=1).values
        weights = torch.full((count, shape.top_k), 1 / shape.top_k)
        times[count] = {arm: {part: [] for part in PARTS} for arm in dispatchers}
        for number in range(WARM_UP + rounds):
            for arm, dispatcher in dispatchers.items():
                both = _both(groups, dispatcher, x, ids, weights)
                apart = _apart(groups, dispatcher, x, ids, weights)
                if number >= WARM_UP:
                    for part, seconds in zip(PARTS, (both, *apart), strict=True):
                        times[count][arm][part].append(seconds)
    for dispatcher in dispatchers.values():
        dispatcher.close()
    return times


def _both(
    groups: Groups, dispatcher: Dispatcher, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> float:
    groups.ep.barrier()
    start = time.perf_counter()
    dispatched = dispatcher.dispatch(x, ids, weights, Phase.DECODE)
    dispatcher.combine(dispatched.rows.rows, dispatched.handle)
    return time.perf_counter() - start


def _apart(
    groups: Groups, dispatcher: Dispatcher, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[float, float]:
    groups.ep.barrier()
    start = time.perf_counter()
    dispatched = dispatcher.dispatch(x, ids, weights, Phase.DECODE)
    dispatch = time.perf_counter() - start
    groups.ep.barrier()
    start = time.perf_counter()
    dispatcher.combine(dispatched.rows.rows, dispatched.handle)
    return dispatch, time.perf_counter() - start
