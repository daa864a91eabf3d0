"""How fast the native CPU kernels are, beside what the memory and torch reach in the same run.

    python benchmarks/kernels_cpu.py [--threads 2] [--seconds 0.5] [--only linear,experts,attention,calls]

Every line is the best of many repetitions, since others may use the machine. Weights of the streaming cases
cycle through more memory than the caches hold, as they do in a decode step.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import torch

import interlock.bench
from interlock.kernels.base import ExpertRows
from interlock.kernels.cpu.build import build_library
from interlock.kernels.cpu.kernels import CpuKernels

STREAM_BYTES = 512 << 20
UNIT_BYTES = 8 << 20


def best(seconds: float, function: Callable[[], object]) -> float:
    """Shortest time of one call, in seconds, over repetitions for about ``seconds``."""
    function()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def read_bandwidth(threads: int, seconds: float) -> float:
    """Bytes per second of reading ``UNIT_BYTES`` of cold memory with ``threads`` threads."""
    sources = Path(interlock.bench.__file__).parent / "native"
    library = ctypes.CDLL(str(build_library(sources=sources, name="read_memory.so")))
    library.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    library.read_memory.restype = ctypes.c_double
    data, units = torch.ones(STREAM_BYTES // 4), STREAM_BYTES // UNIT_BYTES
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        shortest = min(shortest, library.read_memory(data.data_ptr(), UNIT_BYTES, units, threads))
    return UNIT_BYTES / shortest


def best_unit(seconds: float, units: Sequence[Callable[[], object]]) -> float:
    """Shortest time of any unit, calling them in turn so that each finds its memory cold."""
    shortest, end = float("inf"), time.perf_counter() + seconds
    for unit in cycle(units):
        start = time.perf_counter()
        unit()
        now = time.perf_counter()
        shortest = min(shortest, now - start)
        if now > end:
            return shortest
    raise ValueError("units: must not be empty")


def linear_streaming(kernels: CpuKernels, dtype: torch.dtype, limit: float, seconds: float) -> None:
    for n_out, n_in in ((576, 576), (192, 576), (576, 1536), (4096, 4096)):
        size = n_out * n_in * dtype.itemsize
        together = max(1, UNIT_BYTES // size)
        count = max(2, STREAM_BYTES // 2 // (size * together))
        weight = torch.randn(n_out, n_in).to(dtype)
        groups = [[kernels.pack_linear(weight) for _ in range(together)] for _ in range(count)]
        for rows in (1, 2, 4, 8, 16):
            x = torch.randn(rows, n_in).to(dtype)
            units = [lambda g=group, x=x: [kernels.linear(x, weight) for weight in g] for group in groups]
            duration = best_unit(seconds, units) / together
            print(
                f"linear {str(dtype)[6:]:9} rows {rows:3} x [{n_out}, {n_in}] from memory: "
                f"{duration * 1e6:8.1f} us "
                f"{size / duration / 1e9:6.1f} GB/s = {size / duration / limit:4.0%} of the read limit, "
                f"{2 * rows * n_out * n_in / duration / 1e9:6.1f} GFLOP/s"
            )


def linear_computing(kernels: CpuKernels, dtype: torch.dtype, seconds: float) -> None:
    for rows in (16, 64, 512):
        for n_out, n_in in ((576, 576), (1536, 576), (4096, 4096)):
            weight, x = torch.randn(n_out, n_in).to(dtype), torch.randn(rows, n_in).to(dtype)
            packed = kernels.pack_linear(weight)
            ours, theirs = float("inf"), float("inf")
            torch.set_num_threads(kernels.threads)
            for _ in range(3):
                ours = min(ours, best(seconds / 3, lambda x=x, packed=packed: kernels.linear(x, packed)))
                theirs = min(
                    theirs, best(seconds / 3, lambda x=x, w=weight: torch.nn.functional.linear(x, w))
                )
            torch.set_num_threads(1)
            flops = 2 * rows * n_out * n_in
            print(
                f"linear {str(dtype)[6:]:9} rows {rows:3} x [{n_out}, {n_in}]: "
                f"{flops / ours / 1e9:6.1f} GFLOP/s, "
                f"torch {flops / theirs / 1e9:6.1f}, ratio {theirs / ours:4.2f}"
            )


def experts(kernels: CpuKernels, dtype: torch.dtype, limit: float, seconds: float) -> None:
    """The demo's experts: h 576, i 128, 24 experts, 12 a token, a fresh layer of weights each call."""
    count, h, i, top_k, layers = 24, 576, 128, 12, 12
    packed = [
        kernels.pack_experts(torch.randn(count, 2 * i, h).to(dtype), torch.randn(count, h, i).to(dtype) * 0.1)
        for _ in range(layers)
    ]
    for tokens in (1, 2, 4, 16, 64, 512):
        chosen = torch.rand(tokens, count).topk(top_k).indices.flatten()
        order = chosen.argsort(stable=True)
        rows = ExpertRows(
            offsets=torch.cat([torch.zeros(1), torch.bincount(chosen, minlength=count).cumsum(0)]).long(),
            source=order // top_k,
            target=order,
            weight=torch.rand(tokens * top_k),
        )
        x, out = torch.randn(tokens, h).to(dtype), torch.empty(tokens * top_k, h, dtype=dtype)
        units = [lambda p=p, x=x, r=rows, out=out: kernels.expert_mlp(x, p, r, out) for p in packed]
        duration = best_unit(seconds, units)
        touched = int((torch.bincount(chosen, minlength=count) > 0).sum()) * 3 * h * i * dtype.itemsize
        flops = 2 * tokens * top_k * 3 * h * i
        print(
            f"experts {str(dtype)[6:]:9} tokens {tokens:3}: {duration * 1e6:8.1f} us "
            f"{touched / duration / 1e9:6.1f} GB/s = {touched / duration / limit:4.0%} of the read limit, "
            f"{flops / duration / 1e9:6.1f} GFLOP/s"
        )


def attention(kernels: CpuKernels, dtype: torch.dtype, seconds: float) -> None:
    for nh, kvh, hd, vd in ((9, 3, 64, 64), (16, 1, 192, 128)):
        for queries, keys, sequences in ((1, 1024, 1), (1, 1024, 16), (512, 512, 1), (512, 4096, 1)):
            pages = -(-keys // 64)
            k_cache = torch.randn(pages * sequences, 64, kvh, hd).to(dtype)
            v_cache = torch.randn(pages * sequences, 64, kvh, vd).to(dtype)
            arguments = {
                "k_cache": k_cache,
                "v_cache": v_cache,
                "page_table": torch.arange(pages * sequences, dtype=torch.int32).view(sequences, pages),
                "query_start": torch.arange(sequences + 1, dtype=torch.int32) * queries,
                "kv_len": torch.full((sequences,), keys, dtype=torch.int32),
                "scale": hd**-0.5,
                "window": None,
                "sinks": None,
            }
            q = torch.randn(queries * sequences, nh, hd).to(dtype)
            duration = best(seconds, lambda q=q, a=arguments: kernels.paged_attention(q, **a))
            pairs = sequences * (queries * (keys - queries) + queries * (queries + 1) // 2)
            print(
                f"attention {str(dtype)[6:]:9} {nh}/{kvh} heads {hd}/{vd}, "
                f"{sequences:2} x {queries:3} queries, "
                f"{keys:4} keys: {duration * 1e6:9.1f} us, "
                f"{2 * pairs * nh * (hd + vd) / duration / 1e9:6.1f} GFLOP/s, "
                f"cache {(k_cache.nbytes + v_cache.nbytes) / duration / 1e9:5.1f} GB/s"
            )


def calls(kernels: CpuKernels, seconds: float) -> None:
    """Cost of the smallest calls: what the wrapper costs."""
    x, weight = torch.randn(1, 32), torch.ones(32)
    packed = kernels.pack_linear(torch.randn(32, 32))
    ids, rows = torch.zeros(1, 1, dtype=torch.int64), torch.randn(1, 1, 32)
    cases: dict[str, Callable[[], object]] = {
        "torch.empty": lambda: torch.empty((1, 32)),
        "linear": lambda: kernels.linear(x, packed),
        "rms_norm": lambda: kernels.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, x, weight, 1e-6),
        "silu_and_mul": lambda: kernels.silu_and_mul(x),
        "sum_lanes": lambda: kernels.sum_lanes(rows, ids, torch.float32),
    }
    for name, function in cases.items():
        duration = best(seconds / 4, lambda function=function: [function() for _ in range(100)]) / 100
        print(f"call {name:12} {duration * 1e6:5.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each line")
    parser.add_argument("--only", default="linear,experts,attention,calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = CpuKernels(threads=options.threads)
    limit = read_bandwidth(options.threads, options.seconds)
    print(f"memory read, {options.threads} threads: {limit / 1e9:.1f} GB/s")
    parts = options.only.split(",")
    for dtype in (torch.float32, torch.bfloat16):
        if "linear" in parts:
            linear_streaming(kernels, dtype, limit, options.seconds)
            linear_computing(kernels, dtype, options.seconds)
        if "experts" in parts:
            experts(kernels, dtype, limit, options.seconds)
        if "attention" in parts:
            attention(kernels, dtype, options.seconds)
    if "calls" in parts:
        calls(kernels, options.seconds)
    print(f"memory read again: {read_bandwidth(options.threads, options.seconds) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
