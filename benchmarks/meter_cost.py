"""What counting the expert load costs a CPU step, per layer: when counted, when not, and the mean.

    python benchmarks/meter_cost.py [--calls 4000]

Times are this thread's CPU time. The budget is 1 % of the time of a layer in the same step.
"""

from __future__ import annotations

import argparse
import time

import torch

from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.meter import SAMPLE_EVERY, LoadMeter
from interlock.moe.terms import Phase


def shapes(tokens: int, top_k: int, experts: int) -> dict[str, ExpertInput]:
    """Rows of one decode step in each layout; their contents are never touched."""
    ids = torch.randint(0, experts, (tokens, top_k))
    counts = torch.bincount(ids.flatten(), minlength=experts).to(torch.int32)
    rows = torch.zeros(1, 1)
    return {
        "replicated": ReplicatedRows(rows, ids, None),
        "contiguous": ContiguousRows(rows, counts.cumsum(0).to(torch.int32), counts, 1, None),
        "masked": MaskedRows(rows[None], counts, None),
    }


def seconds_per_layer(rows: ExpertInput, experts: int, calls: int, *, every: int) -> float:
    meter = LoadMeter(experts, torch.device("cpu"), shares=dict.fromkeys(Phase, 1), every=every)
    meter.add_layer(0)
    meter.start()
    begun = time.thread_time()
    for _ in range(calls):
        meter.begin_step(Phase.DECODE, 1)
        meter.dispatching()
        meter.dispatched(0, rows)
        meter.combining()
        meter.combined()
    return (time.thread_time() - begun) / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=4000)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    print(f"microseconds of a layer; one step in {SAMPLE_EVERY} is counted")
    print(f"{'layout':<12}{'tokens':>7}{'experts':>9}{'counted':>9}{'not':>7}{'mean':>7}")
    for tokens, top_k, experts in ((32, 2, 8), (64, 8, 128), (256, 8, 256)):
        for name, rows in shapes(tokens, top_k, experts).items():
            counted = seconds_per_layer(rows, experts, calls, every=1)
            other = seconds_per_layer(rows, experts, calls, every=1 << 40)
            mean = (counted + (SAMPLE_EVERY - 1) * other) / SAMPLE_EVERY
            print(
                f"{name:<12}{tokens:>7}{experts:>9}{counted * 1e6:>9.1f}{other * 1e6:>7.2f}{mean * 1e6:>7.2f}"
            )


if __name__ == "__main__":
    main()
