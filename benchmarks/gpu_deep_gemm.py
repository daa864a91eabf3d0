"""DeepGEMM's grouped products alone on a GPU: how long they compile, and how to call them fastest.

    python benchmarks/gpu_deep_gemm.py
    python benchmarks/gpu_deep_gemm.py --compile    # only that, by nvcc and by NVRTC, half a minute

Ways: ends of segments ("psum", what the runner uses) with several numbers of rows that the library is told to
expect, or an expert for each row ("rows"). MiMo-V2-Flash, uniform routing, rows padded to 128 an expert.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import time_graph

from interlock.kernels.triton import placed_rows
from interlock.moe.experts.deep_gemm.library import load_deep_gemm

EXPERTS, TOP_K = 256, 8
PRODUCTS = {"gate_up": (4096, 4096), "down": (4096, 2048)}
"""N and K."""
COMPILE = """
import time, torch
from interlock.moe.experts.deep_gemm.library import load_deep_gemm
library = load_deep_gemm()
for n, k in ((4096, 4096), (4096, 2048)):
    start = time.monotonic()
    e4m3, device = torch.float8_e4m3fn, "cuda"
    library.contiguous(
        torch.zeros(128, k, dtype=e4m3, device=device), torch.zeros(k // 128, 128, device=device),
        torch.zeros(256, n, k, dtype=e4m3, device=device),
        torch.zeros(256, n // 128, k // 128, device=device),
        torch.zeros(256, dtype=torch.int32, device=device),
    )
    torch.cuda.synchronize()
    print(f"{time.monotonic() - start:.1f} s", end=" ")
"""


def compile_times() -> None:
    """Seconds to compile both products from nothing, by either compiler."""
    for name, flag in (("nvcc", "0"), ("nvrtc", "1")):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "DG_JIT_CACHE_DIR": cache, "DG_JIT_USE_NVRTC": flag}
            start = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
            )
            text = done.stdout.strip() if done.returncode == 0 else done.stderr[-300:]
            print(f"compile with {name}: {text}; whole process {time.monotonic() - start:.1f} s", flush=True)


def expert_of_rows(psum: torch.Tensor, counts: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 [rows]: the expert of each filled row, -1 elsewhere."""
    index = torch.arange(rows, device=psum.device, dtype=torch.int32)
    starts = psum - counts
    expert = (torch.searchsorted(starts, index, right=True) - 1).clamp_min(0)
    return torch.where(index < psum[expert], expert, -1).to(torch.int32)


def ways(tokens: int, product: str, seed: int) -> dict[str, Callable[[], object]]:
    """Calls of one product by way."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, device="cuda", generator=generator).topk(TOP_K).indices
    places = placed_rows.aligned_places(ids.sort(1).values, EXPERTS, 128)
    n, k = PRODUCTS[product]
    rows = torch.randn(places.rows, k, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(k // 128, places.rows, device="cuda", generator=generator)
    weight = torch.empty(EXPERTS, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for expert in weight:
        expert.copy_(torch.randn(n, k, device="cuda", generator=generator) * 60)
    weight_scales = torch.rand(EXPERTS, n // 128, k // 128, device="cuda", generator=generator) * 1e-3
    out = torch.empty(places.rows, n, dtype=torch.bfloat16, device="cuda")
    multiply = load_deep_gemm().module.m_grouped_fp8_gemm_nt_contiguous
    operands = ((rows, scales.T), (weight, weight_scales), out)

    def by_ends(expected: int | None) -> Callable[[], object]:
        options = {} if expected is None else {"expected_m_for_psum_layout": expected}
        return lambda: multiply(*operands, places.psum, use_psum_layout=True, **options)

    used = int(((places.counts + 127) // 128 * 128).sum())
    layout = expert_of_rows(places.psum, places.counts, places.rows)
    cut = ((rows[:used], scales[:, :used].contiguous().T), (weight, weight_scales), out[:used])
    return {
        "psum": by_ends(None),
        "psum 64": by_ends(64),
        "psum 128": by_ends(128),
        "psum 1024": by_ends(1024),
        "psum 8192": by_ends(8192),
        "rows, static": lambda: multiply(*operands, layout),
        "rows, exact": lambda: multiply(*cut, layout[:used]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="time only the compilation of both products")
    only_compile = parser.parse_args().compile
    compile_times()
    if only_compile:
        return
    for tokens in (1024, 2048, 4096, 16384):
        for product in PRODUCTS:
            n, k = PRODUCTS[product]
            found = []
            for name, call in ways(tokens, product, tokens).items():
                try:
                    seconds = time_graph([call]).median
                except RuntimeError as problem:
                    found.append(f"{name}: {str(problem)[:80]}")
                    continue
                tflop = 2.0 * n * k * tokens * TOP_K / seconds / 1e12
                found.append(f"{name}: {seconds * 1e6:.0f} us {tflop:.0f} TF")
            print(f"{tokens} {product}: {'; '.join(found)}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
