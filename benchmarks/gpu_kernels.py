"""Check and time the GPU kernels: one MoE layer, and the parts around it. Needs a CUDA device.

    python benchmarks/gpu_kernels.py layer --out evidence/h200/moe_layer.json
    python benchmarks/gpu_kernels.py parts --out evidence/h200/attention.json
    python benchmarks/gpu_tune.py --out src/interlock/kernels/triton/tuned_h200.json

A layer is: top-k choice from logits, row lists, quantisation, two grouped GEMMs with SwiGLU between, weighted
sum over the lanes. Bytes counted: the weights of the experts that are hit. FLOP: 6 * h * i * tokens * k.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import bandwidth, time_graph

from interlock.kernels.triton import moe, router, row_lists
from interlock.kernels.triton.attention import paged_attention
from interlock.kernels.triton.expert_tensors import ExpertTensors
from interlock.kernels.triton.row_blocks import reference_quantise
from interlock.kernels.triton.tuned import MoeConfig, MoeShape, load_table, nearest

TOP_K = 8
SHAPES = {
    "MiMo-V2-Flash": (256, 4096, 2048),
    "MiMo-V2.5-Pro EP16": (24, 6144, 2048),
    "DeepSeek-V3 EP8": (32, 7168, 2048),
    "DeepSeek-V3": (256, 7168, 2048),
    "Qwen3-30B-A3B": (128, 2048, 768),
    "MiMo-V2-Flash EP8": (32, 4096, 2048),
}
ROUTED = {"MiMo-V2.5-Pro EP16": 384, "DeepSeek-V3 EP8": 256, "MiMo-V2-Flash EP8": 256}
"""Experts of the whole model where this rank holds a share; tokens then route over all of them."""


def random_weights(shape: str, dtype: str, seed: int = 0) -> ExpertTensors:
    """Random experts; e4m3 with block scales around 0.02 / 448, or bfloat16 around 0.02."""
    experts, hidden, inter = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(seed)

    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind = torch.float8_e4m3fn if dtype == "fp8" else torch.bfloat16
        weight = torch.empty(experts, rows, columns, dtype=kind, device="cuda")
        for expert in range(experts):
            values = torch.randn(rows, columns, device="cuda", generator=generator)
            weight[expert] = (values * (60.0 if dtype == "fp8" else 0.02)).to(kind)
        if dtype != "fp8":
            return weight, None
        scales = torch.rand(experts, rows // 128, columns // 128, device="cuda", generator=generator)
        return weight, (scales + 0.5) * (0.02 / 60.0)

    gate_up, gate_up_scales = matrix(2 * inter, hidden)
    down, down_scales = matrix(hidden, inter)
    return ExpertTensors(gate_up, down, gate_up_scales, down_scales)


def random_inputs(shape: str, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x bfloat16 [tokens, h] and logits float32 [tokens, all experts]: uniform routing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = SHAPES[shape][1]
    routed = ROUTED.get(shape, SHAPES[shape][0])
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).to(torch.bfloat16)
    return x, torch.randn(tokens, routed, device="cuda", generator=generator)


def layer(x: torch.Tensor, logits: torch.Tensor, weights: ExpertTensors, config: MoeConfig) -> torch.Tensor:
    """The whole MoE layer after the router's matrix product."""
    experts = weights.down.shape[0]
    ids, factors = router.top_k(logits, None, TOP_K, sigmoid=True, normalise=True)
    if logits.shape[1] != experts:
        ids = torch.where(ids < experts, ids, -1)
    lists = row_lists.token_lists(ids, factors, experts, config.block_rows)
    lanes = torch.empty(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    moe.compute(x, None, weights, lists, lanes.flatten(0, 1), config)
    return moe.sum_lanes(lanes, ids, x.dtype)


def layer_error(got: torch.Tensor, x: torch.Tensor, logits: torch.Tensor, weights: ExpertTensors) -> float:
    """Relative to the nearer of two emulations: gate and up as they are, or rounded to bfloat16 in between.

    Products that store them do the latter; which way it goes depends on runner and rows.
    """
    return min(
        relative_error(got, reference_layer(x, logits, weights, rounds_gate_up=rounds))
        for rounds in (False, True)
    )


def reference_layer(
    x: torch.Tensor, logits: torch.Tensor, weights: ExpertTensors, *, rounds_gate_up: bool = False
) -> torch.Tensor:
    """W8A8 (or bfloat16) emulation in float64."""
    scores = logits.double().sigmoid()
    ids = scores.topk(TOP_K).indices
    factors = scores.gather(1, ids)
    factors = factors / factors.sum(1, keepdim=True)
    x = _rounded(x, weights.fp8)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        if expert >= weights.down.shape[0]:
            continue
        rows, lanes = (ids == expert).nonzero(as_tuple=True)
        product = x[rows] @ _wide(weights.gate_up, weights.gate_up_scales, expert).T
        if rounds_gate_up:
            product = product.to(torch.bfloat16).double()
        gate, up = product.chunk(2, dim=1)
        act = _rounded(torch.nn.functional.silu(gate) * up, weights.fp8)
        result = act @ _wide(weights.down, weights.down_scales, expert).T
        out.index_add_(0, rows, result * factors[rows, lanes, None])
    return out


def _rounded(x: torch.Tensor, fp8: bool) -> torch.Tensor:
    if not fp8:
        return x.to(torch.bfloat16).double()
    quantised, scale = reference_quantise(x)
    return (quantised.double().unflatten(1, (-1, 128)) * scale.T[:, :, None].double()).flatten(1)


def _wide(weight: torch.Tensor, scales: torch.Tensor | None, expert: int) -> torch.Tensor:
    values = weight[expert].double()
    if scales is None:
        return values
    return values * scales[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@dataclass(frozen=True, slots=True)
class Work:
    """What one layer must move and compute for these ids."""

    expert_bytes: float
    flop: float

    @staticmethod
    def count(shape: str, logits: list[torch.Tensor], weights: ExpertTensors) -> Work:
        experts, hidden, inter = SHAPES[shape]
        each = weights.gate_up[0].nbytes + weights.down[0].nbytes
        hit, rows = 0, 0
        for one in logits:
            ids = one.topk(TOP_K).indices
            ids = ids[ids < experts]
            hit += ids.unique().numel()
            rows += ids.numel()
        return Work(hit * each / len(logits), 6.0 * hidden * inter * rows / len(logits))


def time_layer(shape: str, tokens: int, weights: ExpertTensors, config: MoeConfig) -> dict[str, object]:
    """Best and median microseconds of one layer, TB/s of expert weights, TFLOP/s of useful work."""
    sets = max(1, min(16, 256 // tokens))
    inputs = [random_inputs(shape, tokens, 100 + index) for index in range(sets)]
    calls: list[Callable[[], object]] = [
        lambda x=x, logits=logits: layer(x, logits, weights, config) for x, logits in inputs
    ]
    timing = time_graph(calls)
    work = Work.count(shape, [logits for _, logits in inputs], weights)
    return {
        "tokens": tokens,
        "best_us": round(timing.best * 1e6, 1),
        "median_us": round(timing.median * 1e6, 1),
        "tb_s": round(work.expert_bytes / timing.median / 1e12, 3),
        "tflop_s": round(work.flop / timing.median / 1e12, 1),
        "config": config.to_json(),
    }


def check_layer(shape: str, tokens: int, weights: ExpertTensors, config: MoeConfig) -> float:
    x, logits = random_inputs(shape, tokens, 7 + tokens)
    return layer_error(layer(x, logits, weights, config), x, logits, weights)


BARS_US = {4096: 2900.0, 16384: 7500.0}
"""Bars of the whole layer at MiMo-V2-Flash fp8, microseconds."""


def bar_of(shape: str, dtype: str, tokens: int, read: float) -> str:
    """The bar that a size of MiMo-V2-Flash fp8 is held to, as TB/s or microseconds."""
    if shape != "MiMo-V2-Flash" or dtype != "fp8":
        return ""
    if tokens <= 8:
        return ">= 3.2 TB/s"
    if 32 <= tokens <= 512:
        return f">= {0.9 * read / 1e12:.2f} TB/s"
    return f"<= {BARS_US[tokens]:.0f} us" if tokens in BARS_US else ""


def run_layers(tokens: list[int], shapes: list[str], dtypes: list[str]) -> dict[str, object]:
    rates = bandwidth()
    print(f"read {rates['read'] / 1e12:.2f} TB/s, copy {rates['copy'] / 1e12:.2f} TB/s")
    results = []
    for shape in shapes:
        for dtype in dtypes:
            weights = random_weights(shape, dtype)
            for count in tokens:
                results.append(run_layer(shape, dtype, count, weights, rates["read"]))
            del weights
            torch.cuda.empty_cache()
    return {"bandwidth": rates, "layers": results}


def run_layer(shape: str, dtype: str, tokens: int, weights: ExpertTensors, read: float) -> dict[str, object]:
    experts, hidden, inter = SHAPES[shape]
    rows = tokens * TOP_K * experts // ROUTED.get(shape, experts)
    config = nearest(
        load_table(), MoeShape(experts, hidden, inter, "fp8" if dtype == "fp8" else "bfloat16"), rows
    )
    error = check_layer(shape, min(tokens, 512), weights, config)
    timed = time_layer(shape, tokens, weights, config)
    bar = bar_of(shape, dtype, tokens, read)
    print(
        f"{shape:20s} {dtype} {tokens:6d} tokens: "
        f"best {timed['best_us']:9.1f} median {timed['median_us']:9.1f} us"
        f" {timed['tb_s']:6.2f} TB/s {timed['tflop_s']:7.1f} TFLOP/s error {error:.1e} {bar}",
        flush=True,
    )
    return {"shape": shape, "dtype": dtype, "relative_error": error, "bar": bar, **timed}


def time_attention(
    name: str, sequences: int, length: int, queries: int, heads: tuple[int, int], window: int | None
) -> dict[str, object]:
    """Paged attention with 192 / 128 heads and sinks; TB/s of keys and values, TFLOP/s of visible pairs."""
    (query_heads, kv_heads), page_size = heads, 64
    pages = sequences * -(-length // page_size)
    k_cache = torch.randn(pages, page_size, kv_heads, 192, device="cuda").to(torch.bfloat16)
    v_cache = torch.randn(pages, page_size, kv_heads, 128, device="cuda").to(torch.bfloat16)
    q = torch.randn(sequences * queries, query_heads, 192, device="cuda").to(torch.bfloat16)
    table = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    starts = (torch.arange(sequences + 1, device="cuda") * queries).int()
    lengths = torch.full((sequences,), length, device="cuda", dtype=torch.int32)
    sinks = torch.randn(query_heads, device="cuda")

    def call() -> torch.Tensor:
        return paged_attention(
            q, k_cache=k_cache, v_cache=v_cache, page_table=table, query_start=starts, kv_len=lengths,
            scale=192**-0.5, window=window, sinks=sinks,
        )  # fmt: skip

    timing = time_graph([call] * 4)
    keys = min(length, window or length)
    pairs = queries * keys if window else queries * length - queries * (queries - 1) / 2
    nbytes = sequences * keys * kv_heads * 320 * 2
    flop = 2.0 * sequences * query_heads * pairs * 320
    fields = {
        "name": name, "sequences": sequences, "length": length, "queries": queries, "heads": heads,
        "window": window, "best_us": round(timing.best * 1e6, 1), "median_us": round(timing.median * 1e6, 1),
        "tb_s": round(nbytes / timing.median / 1e12, 3), "tflop_s": round(flop / timing.median / 1e12, 1),
    }  # fmt: skip
    print(fields, flush=True)
    return fields


def run_parts() -> dict[str, object]:
    full, sliding = (64, 4), (64, 8)
    cases = [
        ("decode full", 1, 128, 1, full, None), ("decode full", 64, 4096, 1, full, None),
        ("decode full", 256, 4096, 1, full, None), ("decode full", 1, 131072, 1, full, None),
        ("decode window", 256, 4096, 1, sliding, 128), ("decode window", 512, 4096, 1, sliding, 128),
        ("prefill full", 1, 8192, 8192, full, None), ("prefill full", 32, 1024, 1024, full, None),
        ("prefill window", 1, 8192, 8192, sliding, 128),
    ]  # fmt: skip
    return {"attention": [time_attention(*case) for case in cases]}


def machine() -> dict[str, object]:
    import triton

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["layer", "parts"])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["MiMo-V2-Flash"])
    parser.add_argument("--dtypes", nargs="+", choices=["fp8", "bfloat16"], default=["fp8"])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "layer":
        report = run_layers(options.tokens, options.shapes, options.dtypes)
    else:
        report = run_parts()
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"machine": machine(), **report}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
