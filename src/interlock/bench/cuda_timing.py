"""Timing on a GPU: CUDA graphs replayed between events, and how fast memory can be read."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

READ_BYTES = 8 << 30
PRODUCT = 8192


def graph_times(calls: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Seconds of one call for each replay of a graph that holds all ``calls``, after a first that compiles.

    Calls with different inputs keep caches from helping; launching from the host costs nothing, as in a step
    that is captured.
    """
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
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / len(calls) for start, end in events]


def read_bandwidth() -> tuple[float, str]:
    """Bytes a second of a kernel that only reads, and how it was measured."""
    from interlock.bench.read_kernel import read_all

    free = torch.cuda.mem_get_info()[0]
    size = min(READ_BYTES, free // 4) // 4
    data = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device="cuda")
    times = graph_times([lambda: read_all(data)], 10)
    return data.nbytes / min(times), f"reading {data.nbytes >> 20} MiB once"


def fp8_peak() -> tuple[float, str]:
    """Operations a second of a dense e4m3 product by the vendor's library, and how it was measured."""
    left, right = (torch.randn(PRODUCT, PRODUCT, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    times = graph_times([product], 10)
    return 2.0 * PRODUCT**3 / min(times), f"e4m3 product of {PRODUCT} cubed by the vendor's library"
