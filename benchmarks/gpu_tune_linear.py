"""Tune the dense linears: time candidate launches for each shape and number of rows, keep the best.

    python benchmarks/gpu_tune_linear.py --out src/interlock/kernels/triton/tuned_linear_h200.json

First every kernel runs once in a process of its own with a time limit; one that fails or hangs is left out
and named. Then all candidates are compiled in parallel, checked against a product in float32 of what the fp8
(or bfloat16) operands stand for, and timed in CUDA graphs over several weights, so that no cache helps. A
shape is written as soon as it is done; shapes that are not tuned again stay in the table as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn.functional import linear as library_linear

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import time_graph

from interlock.errors import StartupError
from interlock.kernels.triton.expert_tensors import quantise_blocks
from interlock.kernels.triton.fp8_rows import quantise_rows
from interlock.kernels.triton.linear_launch import launch
from interlock.kernels.triton.norm import add_rms_norm
from interlock.kernels.triton.tuned_linear import (
    Library,
    LinearConfig,
    LinearShape,
    Simple,
    Stream,
    Tiles,
    simple_config,
    to_json,
)
from interlock.moe.experts.deep_gemm.library import load_deep_gemm

SHAPES = {
    "qkv_window": LinearShape(14848, 4096, "fp8"),
    "qkv_full": LinearShape(13568, 4096, "fp8"),
    "o": LinearShape(4096, 8192, "bfloat16"),
    "gate_up": LinearShape(32768, 4096, "fp8"),
    "down": LinearShape(4096, 16384, "fp8"),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 8192, 16384)
FEW = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
"""Rows tuned for the shapes that a model has one of, or that the vendor's library computes otherwise."""
DEEP_GEMM_ROWS = 8192
"""Rows from which DeepGEMM's product, compiled for just so many rows, is tried too."""
BOUND = 1e-2
BYTES_BETWEEN_USES = 256 << 20

SMOKE: dict[str, LinearConfig] = {
    "simple": Simple(16, 64, 1, 4, 4),
    "stream, weights first": Stream(16, 64, 4, 2, 1, 2, True),
    "stream, rows first": Stream(16, 32, 4, 2, 1, 2, False),
    "stream, early": Stream(16, 64, 4, 2, 1, 2, True, early=True),
    "tiles": Tiles(128, False, 16, 5),
    "tiles, wide": Tiles(256, False, 16, 4),
    "tiles from registers": Tiles(128, True, 16, 5),
    "tiles from registers, wide": Tiles(256, True, 16, 4),
}


def kind_of(config: LinearConfig) -> str:
    """Of our kernels, which entry of SMOKE must have run for ``config`` to be tried."""
    if isinstance(config, Stream) and config.early:
        return "stream, early"
    if isinstance(config, Stream):
        return "stream, weights first" if config.weights_first else "stream, rows first"
    if isinstance(config, Tiles):
        return ("tiles from registers" if config.from_registers else "tiles") + (
            ", wide" if config.columns == 256 else ""
        )
    return "simple"


def few_rows(rows: int, shape: LinearShape) -> Iterator[LinearConfig]:
    """Candidates that stream the weight past one block of rows."""
    fp8 = shape.weight_dtype == "fp8"
    block = max(16, 1 << (rows - 1).bit_length())
    narrow = shape.width <= 8192
    if block == 16:
        yield Stream(16, 64, 4, 2, 1, 2, True)
        yield Stream(16, 64, 2, 5, 1, 2, True)
        yield Stream(16, 128, 2, 6, 1, 1, True)
        yield Stream(16, 32, 4, 2, 1, 2, False)
    if block == 32:
        yield Stream(32, 64, 4, 2, 1, 2, True)
        yield Stream(32, 64, 2, 4, 1, 2, True)
        yield Stream(32, 128, 2, 5, 1, 1, True)
        yield Stream(32, 32, 4, 2, 1, 2, False)
    if block == 64:
        yield Stream(64, 64, 2, 3, 1, 2, False)
        yield Stream(64, 128, 2, 4, 1, 1, False)
        yield Stream(64, 64, 4, 3, 1, 1, False)
        yield Stream(64, 64, 2, 3, 1, 2, True)
    if block <= 32 and narrow:
        yield Stream(block, 32, 4, 4, 1, 1, False)
        yield Stream(block, 32, 8 if not fp8 else 2, 2 if not fp8 else 8, 1, 1, False)
        yield Stream(block, 64, 4, 4, 2, 1, True)
        yield Stream(block, 64, 4, 2, 4, 2, True)
    if block == 64 and narrow:
        yield Stream(64, 64, 4, 3, 2, 1, False)
        yield Stream(64, 64, 2, 3, 4, 2, False)


def candidates(rows: int, shape: LinearShape) -> Iterator[LinearConfig]:
    fp8 = shape.weight_dtype == "fp8"
    if rows <= 64:
        yield from few_rows(rows, shape)
    if not fp8:
        yield Library()
        return
    if rows <= 256:
        yield simple_config(shape, rows)
    if rows <= 16:
        yield Simple(16, 64, 1, 8, 4)
        yield Simple(16, 128, 1, 6, 4)
    if 64 < rows <= 128:
        yield Stream(64, 128, 2, 4, 1, 1, False)
    if 64 <= rows <= 1024:
        yield Tiles(128, True, 16, 6)
        yield Tiles(128, False, 16, 6)
    if rows >= 128:
        yield Tiles(256, True, 16, 4)
        yield Tiles(256, False, 16, 4)
    if rows >= 2048:
        yield Tiles(256, True, 8, 4)
        yield Tiles(256, True, 64, 4)


@dataclass(frozen=True, slots=True)
class Problem:
    """One shape: enough weights that a cache holds none of them when its turn comes again."""

    shape: LinearShape
    weights: list[tuple[torch.Tensor, torch.Tensor | None]]

    @staticmethod
    def random(shape: LinearShape, copies: int | None = None) -> Problem:
        fp8 = shape.weight_dtype == "fp8"
        size = shape.width * shape.depth * (1 if fp8 else 2)
        copies = max(2, -(-BYTES_BETWEEN_USES // size)) if copies is None else copies
        first = torch.randn(shape.width, shape.depth, device="cuda") * shape.depth**-0.5
        if not fp8:
            return Problem(shape, [(first.bfloat16(), None) for _ in range(copies)])
        values, scales = quantise_blocks(first)
        return Problem(shape, [(values.clone(), scales.clone()) for _ in range(copies)])

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = torch.randn(count, self.shape.depth, device="cuda").bfloat16()
        return quantise_rows(x) if self.shape.weight_dtype == "fp8" else (x, None)

    def reference(self, x: torch.Tensor, x_scales: torch.Tensor | None) -> torch.Tensor:
        """float32 of the first and last 128 rows."""
        weight, scales = self.weights[0]
        picked = self.picked(x)
        if x_scales is None or scales is None:
            return picked.float() @ weight.float().T
        wide = picked.float() * self.picked(x_scales.T).repeat_interleave(128, 1)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return wide @ (weight.float() * spread[: self.shape.width]).T

    @staticmethod
    def picked(matrix: torch.Tensor) -> torch.Tensor:
        return matrix if len(matrix) <= 256 else torch.cat((matrix[:128], matrix[-128:]))


def call(
    config: LinearConfig,
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    if isinstance(config, Library):
        return library_linear(x, weight)
    return launch(config, x, x_scales, weight, scales, torch.bfloat16)


def error(config: LinearConfig, problem: Problem, rows: int) -> float:
    x, x_scales = problem.rows(rows)
    got = problem.picked(call(config, x, x_scales, *problem.weights[0])).float()
    want = problem.reference(x, x_scales)
    return float((got - want).norm() / want.norm())


def seconds(config: LinearConfig, problem: Problem, rows: int, *, behind_norm: bool = False) -> float:
    """Of one call; ``behind_norm``: of a norm of the rows and the call after it, as in a layer."""
    x, x_scales = problem.rows(rows)
    hidden = torch.randn(rows, 4096, device="cuda").bfloat16()
    factor = torch.ones(4096, device="cuda").bfloat16()
    repeats = 2 if rows <= 512 else 1

    def one(weight: torch.Tensor, scales: torch.Tensor | None) -> None:
        if behind_norm:
            add_rms_norm(hidden, hidden, factor, 1e-5)
        call(config, x, x_scales, weight, scales)

    calls: list[Callable[[], object]] = [partial(one, *pair) for pair in problem.weights * repeats]
    return time_graph(calls, replays=7 if rows <= 2048 else 3).median


def smoke(kind: str) -> None:
    """Run one kernel at a few sizes and compare; exits nonzero on a wrong result."""
    config = SMOKE[kind]
    dtypes = ("fp8", "bfloat16") if isinstance(config, Stream) else ("fp8",)
    for dtype in dtypes:
        problem = Problem.random(LinearShape(768, 2048, dtype), copies=1)
        for rows in (1, 16, 100, 300):
            found = error(config, problem, rows)
            if not found < BOUND:
                raise SystemExit(f"{kind}, {dtype}: error {found} at {rows} rows")


def kinds_that_run(limit_s: float) -> set[str]:
    """Kinds whose smoke run ended well within ``limit_s``; prints what the others said."""
    started = {
        kind: subprocess.Popen(
            [sys.executable, __file__, "--smoke", kind],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for kind in SMOKE
    }  # fmt: skip
    good, end = set(), time.monotonic() + limit_s
    for kind, process in started.items():
        try:
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"LEFT OUT {kind}: still running after {limit_s:.0f} s", flush=True)
            continue
        if process.returncode == 0:
            good.add(kind)
        else:
            print(f"LEFT OUT {kind}: {output.strip()[-600:]}", flush=True)
    return good


def short(config: LinearConfig) -> str:
    fields = to_json(config)
    name = fields.pop("kernel")
    return f"{name}({','.join(str(int(value)) for value in fields.values())})"


def fastest(pair: tuple[float, LinearConfig]) -> float:
    return pair[0]


def start_early(config: LinearConfig, problem: Problem, rows: int) -> LinearConfig:
    """``config`` started before the norm in front of it has ended, where that is correct and faster."""
    for early in earlier(config):
        try:
            if not error(early, problem, rows) < BOUND:
                print(f"{'':6s} early: wrong", flush=True)
                continue
            late_us, early_us = (
                seconds(one, problem, rows, behind_norm=True) * 1e6 for one in (config, early)
            )
        except Exception as reason:
            print(f"{'':6s} early: {type(reason).__name__} {str(reason)[:150]}", flush=True)
            continue
        print(f"{'':6s} with a norm before it {late_us:.1f} us, started early {early_us:.1f} us", flush=True)
        if early_us < late_us:
            return early
    return config


def against_deep_gemm(config: LinearConfig, problem: Problem, rows: int) -> LinearConfig:
    """``config``, and DeepGEMM's product from ``rows`` rows on where that is correct and faster."""
    if not isinstance(config, Tiles) or rows < DEEP_GEMM_ROWS:
        return config
    try:
        multiply = load_deep_gemm().multiply
    except StartupError as reason:
        print(f"{'':6s} deep_gemm: {reason}", flush=True)
        return config
    x, x_scales = problem.rows(rows)
    assert x_scales is not None
    got = problem.picked(multiply(x, x_scales, *problem.weights[0])).float()
    want = problem.reference(x, x_scales)
    found = float((got - want).norm() / want.norm())
    theirs = time_graph([partial(multiply, x, x_scales, *pair) for pair in problem.weights], replays=3)
    ours = seconds(config, problem, rows)
    print(f"{'':6s} deep_gemm {theirs.median * 1e6:.1f} us, error {found:.1e}", flush=True)
    return replace(config, deep_gemm_from=rows) if found < BOUND and theirs.median < ours else config


def earlier(config: LinearConfig) -> list[LinearConfig]:
    """The same launch, started before the kernel in front of it has ended."""
    return [replace(config, early=True)] if isinstance(config, Stream) and not config.early else []


def runs(config: LinearConfig, shape: LinearShape, kinds: set[str]) -> bool:
    known = isinstance(config, Library) or kind_of(config) in kinds
    return known and config.fits(shape.width, shape.depth, shape.weight_dtype)


def measure(
    config: LinearConfig,
    problem: Problem,
    rows: int,
    timed: list[tuple[float, LinearConfig]],
    failed: list[str],
) -> None:
    """Append (microseconds, config), or why there is no time."""
    try:
        found = error(config, problem, rows)
        if found < BOUND:
            timed.append((seconds(config, problem, rows) * 1e6, config))
        else:
            failed.append(f"{short(config)}: error {found:.1e}")
    except Exception as reason:  # a candidate may ask for more than the device has
        failed.append(f"{short(config)}: {type(reason).__name__} {str(reason)[:150]}")


def tune_rows(problem: Problem, rows: int, kinds: set[str]) -> LinearConfig | None:
    """The fastest correct candidate; prints all of them, fastest first."""
    shape = problem.shape
    timed: list[tuple[float, LinearConfig]] = []
    failed: list[str] = []
    for config in dict.fromkeys(candidates(rows, shape)):
        if runs(config, shape, kinds):
            measure(config, problem, rows, timed, failed)
    timed.sort(key=fastest)
    if not timed:
        print(f"{rows:6d} NOTHING RAN {failed}", flush=True)
        return None
    best, chosen = timed[0]
    weight_bytes = shape.width * shape.depth * (1 if shape.weight_dtype == "fp8" else 2)
    flops = 2 * rows * shape.width * shape.depth
    others = "  ".join(f"{short(config)} {us:.1f}" for us, config in timed[1:5])
    print(
        f"{rows:6d} {best:8.1f} us {weight_bytes / best / 1e6:5.2f} TB/s {flops / best / 1e6:6.0f} TFLOP/s  "
        f"{short(chosen)} | {others} {failed or ''}",
        flush=True,
    )
    chosen = against_deep_gemm(chosen, problem, rows)
    return start_early(chosen, problem, rows) if "stream, early" in kinds else chosen


def compile_one(name: str, rows: int, config: LinearConfig) -> None:
    """Launch once, so that the kernel is in the cache on disk."""
    shape = SHAPES[name]
    fp8 = shape.weight_dtype == "fp8"
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    x = torch.zeros(rows, shape.depth, dtype=kind, device="cuda")
    weight = torch.zeros(shape.width, shape.depth, dtype=kind, device="cuda")
    x_scales = torch.zeros(shape.depth // 128, rows, device="cuda") if fp8 else None
    scales = torch.zeros(-(-shape.width // 128), shape.depth // 128, device="cuda") if fp8 else None
    call(config, x, x_scales, weight, scales)
    torch.cuda.synchronize()


def precompile(names: list[str], kinds: set[str], processes: int) -> None:
    """In parallel; what fails here is named when it is measured."""
    jobs = {
        (name, min(rows, 2048), config)
        for name in names
        for rows in rows_of(name)
        for late in candidates(rows, SHAPES[name])
        for config in (late, *earlier(late))
        if runs(config, SHAPES[name], kinds) and not isinstance(config, Library)
    }
    once = {(name, config): rows for name, rows, config in jobs}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, name, rows, config) for (name, config), rows in once.items()]:
            if (reason := done.exception()) is not None:
                print(f"not compiled: {type(reason).__name__} {str(reason)[:150]}", flush=True)


def rows_of(name: str) -> tuple[int, ...]:
    return ROWS if name == "qkv_window" else FEW


def merge(path: Path, shape: LinearShape, by_rows: dict[str, dict[str, object]]) -> None:
    named = {"width": shape.width, "depth": shape.depth, "weight_dtype": shape.weight_dtype}
    old = json.loads(path.read_text(encoding="utf-8"))["linear"] if path.exists() else []
    kept = [entry for entry in old if entry["shape"] != named]
    document = {"linear": [*kept, {"shape": named, "by_rows": by_rows}]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qkv_window", "o", "down"])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds after which no row count starts")
    parser.add_argument("--smoke", choices=list(SMOKE), help="run one kernel once and compare")
    options = parser.parse_args()
    if options.smoke:
        smoke(options.smoke)
        return
    if options.out is None:
        parser.error("--out says where the table goes")
    start = time.monotonic()
    kinds = kinds_that_run(45.0)
    print(f"{len(kinds)} of {len(SMOKE)} kernels run ({time.monotonic() - start:.0f} s)", flush=True)
    precompile(options.shapes, kinds, options.processes)
    print(f"compiled ({time.monotonic() - start:.0f} s)", flush=True)
    for name in options.shapes:
        shape = SHAPES[name]
        print(f"== {name} {shape}", flush=True)
        problem = Problem.random(shape)
        by_rows = {}
        for rows in rows_of(name):
            if time.monotonic() - start > options.budget:
                print(f"{rows:6d} not tuned: out of the budget of {options.budget:.0f} s", flush=True)
                continue
            chosen = tune_rows(problem, rows, kinds)
            if chosen is not None:
                by_rows[str(rows)] = to_json(chosen)
        if by_rows:
            merge(options.out, shape, by_rows)
        del problem
        torch.cuda.empty_cache()
    print(f"done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
