"""Tune the MoE GEMMs: time candidate launch parameters for each shape and number of tokens, keep the best.

    python benchmarks/gpu_tune.py --out src/interlock/kernels/triton/tuned_h200.json

Candidates are compiled in parallel processes first (Triton caches compiled kernels on disk), then timed one
after the other. The table of a shape that is not tuned again stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import ROUTED, SHAPES, TOP_K, random_inputs, random_weights, time_layer

from interlock.kernels.triton import moe, router, row_lists
from interlock.kernels.triton.expert_tensors import ExpertTensors
from interlock.kernels.triton.tuned import MoeConfig, Tile

TOKENS = (1, 8, 64, 256, 512, 1024, 2048, 4096, 16384)


def candidates(dtype: str, share: float) -> Iterator[MoeConfig]:
    """Launch parameters worth trying for ``share`` rows an expert."""
    depth = 128 if dtype == "fp8" else 64

    def tile(warps: int, stages: int) -> Tile:
        return Tile(128, depth, warps, stages)

    if share <= 16:
        yield MoeConfig(16, tile(4, 5), tile(4, 6))
        yield MoeConfig(16, tile(4, 6), tile(4, 4))
        yield MoeConfig(16, tile(8, 6), tile(4, 5))
    if 8 <= share <= 64:
        yield MoeConfig(32, tile(4, 3), tile(4, 4))
        yield MoeConfig(32, tile(8, 5), tile(4, 5))
        yield MoeConfig(32, tile(4, 4), tile(4, 6))
    if 24 <= share <= 300:
        yield MoeConfig(64, tile(8, 4), tile(4, 4))
        yield MoeConfig(64, tile(8, 3), tile(8, 4))
    if share >= 48 and dtype == "fp8":
        yield MoeConfig(128, tile(8, 3), tile(8, 3), pipelined=True)
    if share >= 48 and dtype != "fp8":
        yield MoeConfig(128, tile(8, 3), tile(8, 4))
        yield MoeConfig(128, tile(8, 4), tile(8, 3))


def share_of(shape: str, tokens: int) -> float:
    """Rows an expert gets on average."""
    return tokens * TOP_K / ROUTED.get(shape, SHAPES[shape][0])


def compile_one(shape: str, dtype: str, config: MoeConfig) -> None:
    """Run a config once on few experts, so that its kernels are in the cache on disk."""
    _, hidden, inter = SHAPES[shape]
    kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
    gate_up = torch.zeros(2, 2 * inter, hidden, dtype=kind, device="cuda")
    down = torch.zeros(2, hidden, inter, dtype=kind, device="cuda")
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    if dtype == "fp8":
        scales = tuple(
            torch.zeros(2, w.shape[1] // 128, w.shape[2] // 128, device="cuda") for w in (gate_up, down)
        )
    weights = ExpertTensors(gate_up, down, *scales)
    for tokens in (2, 64):
        x, logits = random_inputs(shape, tokens, 0)
        ids, factors = router.top_k(logits, None, TOP_K, sigmoid=True, normalise=True)
        lists = row_lists.token_lists(torch.where(ids < 2, ids, -1), factors, 2, config.block_rows)
        out = torch.empty(tokens * TOP_K, hidden, dtype=torch.bfloat16, device="cuda")
        moe.compute(x, None, weights, lists, out, config)
    torch.cuda.synchronize()


def precompile(shapes: list[str], dtypes: list[str], tokens: list[int], processes: int) -> None:
    jobs = {
        (shape, dtype, config)
        for shape in shapes
        for dtype in dtypes
        for count in tokens
        for config in candidates(dtype, share_of(shape, count))
    }
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, *job) for job in jobs]:
            done.result()


def tune(shape: str, dtype: str, tokens: list[int]) -> dict[str, object]:
    weights = random_weights(shape, dtype)
    experts, hidden, inter = SHAPES[shape]
    by_rows = {}
    for count in tokens:
        timed = [
            (time_layer(shape, count, weights, config)["median_us"], config)
            for config in candidates(dtype, share_of(shape, count))
        ]
        best, config = min(timed, key=lambda pair: pair[0])
        print(shape, dtype, count, best, config, [pair[0] for pair in timed], flush=True)
        by_rows[str(max(1, round(share_of(shape, count) * experts)))] = config.to_json()
    named = {"experts": experts, "hidden_size": hidden, "intermediate_size": inter}
    return {"shape": {**named, "weight_dtype": dtype}, "by_rows": by_rows}


def merge(path: Path, entries: list[dict[str, object]]) -> None:
    old = json.loads(path.read_text(encoding="utf-8"))["moe"] if path.exists() else []
    renewed = [entry["shape"] for entry in entries]
    kept = [entry for entry in old if entry["shape"] not in renewed]
    path.write_text(json.dumps({"moe": [*kept, *entries]}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=["fp8", "bfloat16"], default=["fp8", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    start = time.monotonic()
    precompile(options.shapes, options.dtypes, options.tokens, options.processes)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for shape in options.shapes:
        for dtype in options.dtypes:
            merge(options.out, [tune(shape, dtype, options.tokens)])
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
