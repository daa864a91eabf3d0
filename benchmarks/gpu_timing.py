"""Best and median time of calls in a CUDA graph, and the card's read and copy bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from interlock.bench.cuda_timing import graph_times
from interlock.bench.read_kernel import BLOCK, STEPS, read_all


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    best: float
    median: float


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 10) -> Timing:
    """Best and median of ``graph_times``."""
    times = graph_times(calls, replays)
    return Timing(min(times), statistics.median(times))


@triton.jit
def _copy_kernel(source, out, size, block: tl.constexpr, steps: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block * steps
    for step in tl.static_range(steps):
        where = start + step * block + tl.arange(0, block)
        tl.store(out + where, tl.load(source + where, mask=where < size), mask=where < size)


def bandwidth(nbytes: int = 8 << 30) -> dict[str, float]:
    """Bytes a second of reading only, and of a copy (read and written bytes counted)."""
    source = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device="cuda")
    read = time_graph([lambda: read_all(source)])
    half = source[: source.numel() // 2]
    other = source[source.numel() // 2 :]
    half_programs = (half.numel() // (BLOCK * STEPS),)
    copy = time_graph(
        [
            lambda: _copy_kernel[half_programs](
                half, other, half.numel(), block=BLOCK, steps=STEPS, num_warps=8
            )
        ]
    )
    return {"read": nbytes / read.best, "copy": nbytes / copy.best}
