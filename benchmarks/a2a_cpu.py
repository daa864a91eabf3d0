"""Dispatch + combine on the CPU: how much faster shared_memory is than collective, same run, same tokens.

  python benchmarks/a2a_cpu.py [--ranks 2] [--hidden 576] [--experts 24] [--top-k 12] [--tokens 1 8 16 64]

``interlock bench a2a`` measures the same for any backend, with the parts apart, and keeps evidence.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from interlock.bench.a2a import A2ARun, arms_for, run_a2a, shape_of
from interlock.plan.facts import probe


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
    shape = shape_of("cpu", hidden=args.hidden, experts=args.experts, top_k=args.top_k, dtype=None)
    run = A2ARun(shape=shape, ranks=args.ranks, tokens=tuple(args.tokens), rounds=args.rounds)
    points = run_a2a(arms_for(run, ["collective", "shared_memory"], probe()), run)
    print(f"{args.ranks} ranks, hidden {args.hidden}, {args.experts} experts, top {args.top_k}, float32")
    print(f"torch {torch.__version__}; median of {args.rounds} rounds, slowest rank, microseconds")
    report: dict[str, dict[str, float]] = {}
    for count in args.tokens:
        medians = {
            f"{point.backend} {point.layout}": point.figure.median * 1e6
            for point in points
            if point.tokens == count and point.part == "both"
        }
        best = {
            name: min(value for arm, value in medians.items() if arm.startswith(name + " "))
            for name in ("collective", "shared_memory")
        }
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
