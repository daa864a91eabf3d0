"""Timing on a GPU: CUDA graphs replayed between events, best and median; the card's read and copy
bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    best: float
    median: float


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 10, warm: bool = True) -> Timing:
    """Time of one call: all ``calls`` (different inputs, so that a cache cannot help) in one graph,
    replayed."""
    if warm:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) / 1e3 / len(calls) for start, end in events]
    return Timing(min(times), statistics.median(times))


@triton.jit
def _read_kernel(source, out, size, block: tl.constexpr, steps: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block * steps
    total = tl.zeros([block], tl.int32)
    for step in tl.static_range(steps):
        where = start + step * block + tl.arange(0, block)
        total ^= tl.load(source + where, mask=where < size, other=0)
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


@triton.jit
def _copy_kernel(source, out, size, block: tl.constexpr, steps: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block * steps
    for step in tl.static_range(steps):
        where = start + step * block + tl.arange(0, block)
        tl.store(out + where, tl.load(source + where, mask=where < size), mask=where < size)


def bandwidth(nbytes: int = 8 << 30) -> dict[str, float]:
    """Bytes a second of reading only, and of a copy (read and written bytes counted)."""
    source = torch.randint(-(2**31), 2**31 - 1, (nbytes // 4,), dtype=torch.int32, device="cuda")
    block, steps = 4096, 8
    programs = -(-source.numel() // (block * steps))
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    read = time_graph(
        [
            lambda: _read_kernel[(programs,)](
                source, out, source.numel(), block=block, steps=steps, num_warps=8
            )
        ]
    )
    half = source[: source.numel() // 2]
    other = source[source.numel() // 2 :]
    half_programs = (half.numel() // (block * steps),)
    copy = time_graph(
        [
            lambda: _copy_kernel[half_programs](
                half, other, half.numel(), block=block, steps=steps, num_warps=8
            )
        ]
    )
    return {"read": nbytes / read.best, "copy": nbytes / copy.best}
