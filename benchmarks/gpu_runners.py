"""Check and time whole MoE layers of every fp8 runner on a GPU, and store which is fastest for how many rows.

    python benchmarks/gpu_runners.py --out runners.json --table src/interlock/moe/experts/measured_h200.json
    python benchmarks/gpu_runners.py --profile 4096 16384 --runners deep_gemm triton_fp8

A layer is what ``interlock bench moe --device cuda`` times. Its output is checked against a W8A8 emulation in
float64 (bound 1e-2, relative) that rounds gate and up to bfloat16 where the runner does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import layer_error, machine

from interlock.bench.layer import LayerPoint, LayerShape
from interlock.bench.layer_cuda import (
    WHOLE_LAYER,
    cuda_limits,
    layer_points,
    load_filled,
    make_layer,
    random_inputs,
)
from interlock.errors import InterlockError
from interlock.kernels.registry import get_kernels
from interlock.moe.experts.base import Runner
from interlock.moe.experts.registry import expert_runners

SHAPES = {
    "MiMo-V2-Flash": LayerShape(hidden=4096, expert_width=2048, experts=256, top_k=8, dtype="bfloat16"),
    "MiMo-V2.5-Pro EP16": LayerShape(
        hidden=6144, expert_width=2048, experts=24, top_k=8, dtype="bfloat16", routed=384
    ),
    "DeepSeek-V3 EP8": LayerShape(
        hidden=7168, expert_width=2048, experts=32, top_k=8, dtype="bfloat16", routed=256
    ),
    "Qwen3-30B-A3B": LayerShape(hidden=2048, expert_width=768, experts=128, top_k=8, dtype="bfloat16"),
}
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BARS = {1: "3.2 TB/s", 8: "3.2 TB/s", 4096: "2900 us", 16384: "7500 us"} | dict.fromkeys(
    (32, 64, 128, 256, 512), "90 % of reading"
)
"""Of the whole layer, MiMo-V2-Flash."""


def check(runner: Runner, layer: Callable[..., torch.Tensor], shape: LayerShape, tokens: int) -> float:
    """Relative error against the emulation."""
    x, logits = random_inputs(shape, tokens, 7 + tokens)
    return layer_error(layer(x, logits), x, logits, runner._tensors)


def run_shape(name: str, runners: list[str], tokens: list[int], rounds: int) -> list[dict[str, object]]:
    """Errors and times of every runner; prints one line for each."""
    shape, kernels, limits = SHAPES[name], get_kernels("triton", threads=1), cuda_limits()
    print(
        f"{name}: read {limits.bandwidth / 1e12:.2f} TB/s, e4m3 {limits.flops / 1e12:.0f} TFLOP/s", flush=True
    )
    found: list[dict[str, object]] = []
    for runner_name in runners:
        try:
            runner = load_filled(expert_runners().get(runner_name), shape, kernels, seed=0)
        except InterlockError as problem:
            print(f"  {runner_name}: {problem}", flush=True)
            continue
        layer = make_layer(runner, kernels, shape)
        for count in tokens:
            error = check(runner, layer, shape, min(count, 2048))
            for point in layer_points(runner_name, layer, count, limits, rounds, seed=0):
                found.append(record(name, point, error))
                print(line(found[-1], BARS.get(count, "") if name == "MiMo-V2-Flash" else ""), flush=True)
        del runner, layer
        torch.cuda.empty_cache()
    return found


def record(name: str, point: LayerPoint, error: float) -> dict[str, object]:
    seconds = point.figure.median
    return {
        "shape": name,
        "runner": point.runner,
        "what": point.layout,
        "tokens": point.tokens,
        "median_us": round(seconds * 1e6, 1),
        "best_us": round(point.figure.least * 1e6, 1),
        "tb_s": round(point.work.weight_bytes / seconds / 1e12, 3),
        "tflop_s": round(point.work.flops / seconds / 1e12, 1),
        "rows": point.work.lanes,
        "relative_error": error,
    }


def line(fields: dict[str, object], bar: str) -> str:
    what = "" if fields["what"] == WHOLE_LAYER else " GEMMs"
    return (
        f"  {fields['runner']}{what:6s} {fields['tokens']:6d}: {fields['median_us']:8.1f} us"
        f" {fields['tb_s']:5.2f} TB/s {fields['tflop_s']:6.1f} TF err {fields['relative_error']:.1e} {bar}"
    )


def stored(records: list[dict[str, object]]) -> dict[str, object]:
    """The table that ``moe/experts/choice.py`` reads: whole layers only, by routed rows."""
    entries = []
    for name in dict.fromkeys(str(record["shape"]) for record in records):
        shape, times = SHAPES[name], {}
        for fields in records:
            timed = fields["shape"] == name and fields["what"] == WHOLE_LAYER
            if timed and fields["runner"] != "fastest_fp8":
                times.setdefault(str(fields["runner"]), {})[str(fields["rows"])] = fields["median_us"]
        entries.append(
            {
                "shape": {
                    "experts": shape.experts,
                    "hidden_size": shape.hidden,
                    "intermediate_size": shape.expert_width,
                },
                "weight_format": "fp8_block",
                "layout": "replicated",
                "microseconds": times,
            }
        )
    return {"measured": entries}


def profile(name: str, runner_name: str, tokens: int) -> None:
    """Microseconds of each kernel of one layer, longest first."""
    shape, kernels = SHAPES[name], get_kernels("triton", threads=1)
    runner = load_filled(expert_runners().get(runner_name), shape, kernels, seed=0)
    layer = make_layer(runner, kernels, shape)
    inputs = random_inputs(shape, tokens, 1)
    for _ in range(3):
        layer(*inputs)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(5):
            layer(*inputs)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 5
    print(f"{name} {runner_name} {tokens} tokens: {total:.0f} us in kernels", flush=True)
    for row in rows[:12]:
        print(f"  {row.self_device_time_total / 5:8.1f} us x{row.count // 5} {row.key[:60]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["MiMo-V2-Flash"])
    parser.add_argument("--runners", nargs="+", default=["triton_fp8", "deep_gemm"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", nargs="+", type=int, default=[], help="tokens to profile, nothing else")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="where to store which runner is fastest")
    options = parser.parse_args()
    with torch.inference_mode():
        if options.profile:
            for shape in options.shapes:
                for runner in options.runners:
                    for tokens in options.profile:
                        profile(shape, runner, tokens)
                        torch.cuda.empty_cache()
            return
        records: list[dict[str, object]] = []
        for shape in options.shapes:
            records += run_shape(shape, options.runners, options.tokens, options.rounds)
            if options.out is not None:
                document = {"machine": machine(), "layers": records}
                options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            if options.table is not None:
                options.table.write_text(json.dumps(stored(records), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
