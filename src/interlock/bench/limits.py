"""What this device can do at most, measured in the same run: bytes read a second and operations a second."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from interlock.errors import InterlockError
from interlock.kernels.base import Kernels

UNIT_BYTES: Final = 8 << 20
CPU_STREAM_BYTES: Final = 256 << 20
CUDA_STREAM_BYTES: Final = 4 << 30
GEMM_ROWS: Final = {"cpu": 512, "cuda": 8192}
GEMM_WIDTH: Final = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second of reading memory that no cache holds, and operations a second of a dense product.

    ``read_by`` and ``computed_by`` say how they were measured.
    """

    bandwidth: float
    flops: float
    read_by: str
    computed_by: str

    def seconds(self, nbytes: float, flops: float) -> float:
        """The roofline: the longer of reading the bytes and doing the operations."""
        return max(nbytes / self.bandwidth, flops / self.flops)


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device, passes: int) -> list[float]:
    """Seconds of one call, for each pass over ``calls`` after a first that does not count.

    On a GPU the pass is timed between two events, so launching is hidden where the work is longer.
    """
    found = []
    for number in range(passes + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for call in calls:
                call()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            for call in calls:
                call()
            seconds = time.perf_counter() - start
        if number:
            found.append(seconds / len(calls))
    return found


def measure_limits(kernels: Kernels, device: torch.device, dtype: torch.dtype, threads: int) -> Limits:
    """Both limits of ``device`` as this process may use it."""
    bandwidth, read_by = _cuda_bandwidth() if device.type == "cuda" else _cpu_bandwidth(threads)
    flops, computed_by = _peak(kernels, device, dtype, threads)
    return Limits(bandwidth, flops, read_by, computed_by)


def _cpu_bandwidth(threads: int) -> tuple[float, str]:
    from interlock.kernels.cpu.build import build_library

    data = torch.ones(CPU_STREAM_BYTES // 4)
    try:
        path = build_library(sources=Path(__file__).parent / "native", name="read_memory.so")
    except InterlockError:
        return _torch_sum_bandwidth(data, threads), f"torch.sum, {threads} threads"
    library = ctypes.CDLL(str(path))
    library.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
    library.read_memory.restype = ctypes.c_double
    units = CPU_STREAM_BYTES // UNIT_BYTES
    best = min(library.read_memory(data.data_ptr(), UNIT_BYTES, units, threads) for _ in range(5))
    return UNIT_BYTES / best, f"reading {UNIT_BYTES >> 20} MiB of cold memory, {threads} threads"


def _torch_sum_bandwidth(data: torch.Tensor, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = time_calls([lambda: data.sum()], data.device, 5)
    finally:
        torch.set_num_threads(before)
    return data.nbytes / min(times)


def _cuda_bandwidth() -> tuple[float, str]:
    free = torch.cuda.mem_get_info()[0]
    data = torch.ones(min(CUDA_STREAM_BYTES, free // 4) // 4, device="cuda")
    times = time_calls([lambda: data.sum()], data.device, 10)
    return data.nbytes / min(times), f"torch.sum of {data.nbytes >> 20} MiB"


def _peak(kernels: Kernels, device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, str]:
    """The faster of torch's product and the kernel set's."""
    rows, width = GEMM_ROWS[device.type], GEMM_WIDTH[device.type]
    x = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, width, device=device).to(dtype)
    packed = kernels.pack_linear(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = {
            "torch": time_calls([lambda: torch.nn.functional.linear(x, weight)], device, 5),
            f"kernels {kernels.name}": time_calls([lambda: kernels.linear(x, packed)], device, 5),
        }
    finally:
        torch.set_num_threads(before)
    best = min(times, key=lambda name: min(times[name]))
    text = f"[{rows}, {width}] x [{width}, {width}] by {best}"
    return 2 * rows * width * width / min(times[best]), text
