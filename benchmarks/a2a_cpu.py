"""Dispatch + combine on the CPU: every a2a backend that exchanges rows, same run, same tokens.

  python benchmarks/a2a_cpu.py [--ranks 2] [--hidden 576] [--experts 24] [--top-k 12] [--tokens 1 8 16 64]

Each figure is the median over rounds of the slowest rank's time for one dispatch and one combine, with an
expert that returns its rows. Backends take turns within a round, so that a busy machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.base import Dispatcher, DispatcherSpec
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.conformance.processes import run_ranks
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from interlock.plugins import load_symbol

WARM_UP = 20


def build(
    name: str, layout: Layout, groups: Groups, hidden: int, experts: int, top_k: int, capacity: int
) -> Dispatcher:
    """One dispatcher; kernels are the fast ones where they can be built."""
    spec = DispatcherSpec(
        groups=groups,
        experts=place(experts, groups.ep.size),
        rank=groups.ep.rank,
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        row_dtype="float32",
        dtype=torch.float32,
        device=torch.device("cpu"),
        layouts=dict.fromkeys(Phase, layout),
        capacity=dict.fromkeys(Phase, capacity),
        kernels=get_kernels("cpu", threads=1),
    )
    dispatcher: Dispatcher = load_symbol(a2a_backends().get(name).dispatcher)(spec)
    return dispatcher


def measure(
    groups: Groups,
    arms: list[tuple[str, str]],
    hidden: int,
    experts: int,
    top_k: int,
    tokens: list[int],
    rounds: int,
) -> dict[int, dict[str, list[float]]]:
    """tokens -> arm -> seconds of each round on this rank; every timed call starts at a barrier."""
    most = max(tokens)
    dispatchers = {
        f"{name} {layout}": build(name, Layout(layout), groups, hidden, experts, top_k, most)
        for name, layout in arms
    }
    generator = torch.Generator().manual_seed(groups.ep.rank)
    times: dict[int, dict[str, list[float]]] = {}
    for count in tokens:
        x = torch.randn(count, hidden, generator=generator)
        ids = torch.rand(count, experts, generator=generator).argsort(dim=1)[:, :top_k].sort(dim=1).values
        weights = torch.full((count, top_k), 1 / top_k)
        times[count] = {arm: [] for arm in dispatchers}
        for round_number in range(WARM_UP + rounds):
            for arm, dispatcher in dispatchers.items():
                groups.ep.barrier()
                start = time.perf_counter()
                dispatched = dispatcher.dispatch(x, ids, weights, Phase.DECODE)
                dispatcher.combine(dispatched.rows.rows, dispatched.handle)
                if round_number >= WARM_UP:
                    times[count][arm].append(time.perf_counter() - start)
    for dispatcher in dispatchers.values():
        dispatcher.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--top-k", type=int, default=12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    arms = [
        (backend.name, layout.value)
        for backend in a2a_backends().entries.values()
        if "cpu" in backend.devices
        for layout in sorted(backend.layouts[Phase.DECODE])
        if layout is not Layout.REPLICATED
    ]
    get_kernels("cpu", threads=1)
    sizes = (args.hidden, args.experts, args.top_k, args.tokens, args.rounds)
    ranks = run_ranks(measure, args.ranks, arms, *sizes)
    print(f"{args.ranks} ranks, hidden {args.hidden}, {args.experts} experts, top {args.top_k}, float32")
    print(f"torch {torch.__version__}; median of {args.rounds} rounds, slowest rank, microseconds")
    report: dict[str, dict[str, float]] = {}
    for count in args.tokens:
        medians = {}
        for arm in ranks[0][count]:
            slowest = [max(times) for times in zip(*(rank[count][arm] for rank in ranks), strict=True)]
            medians[arm] = statistics.median(slowest) * 1e6
        best = {name: min(v for arm, v in medians.items() if arm.startswith(name + " ")) for name, _ in arms}
        ratio = best["collective"] / best["shared_memory"]
        figures = ", ".join(f"{arm} {value:.0f}" for arm, value in medians.items())
        print(f"{count:5d} tokens: {figures}; shared_memory is {ratio:.1f}x faster than collective")
        report[str(count)] = medians | {"speed-up": ratio}
    if args.json:
        args.json.write_text(
            json.dumps({"arguments": vars(args) | {"json": None}, "median_us": report}, indent=1)
        )


if __name__ == "__main__":
    main()
