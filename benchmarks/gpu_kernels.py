"""Check and time the GPU kernels: one MoE layer, and the parts around it. Needs a CUDA device.

    python benchmarks/gpu_kernels.py layer --out evidence/h200/moe_layer.json
    python benchmarks/gpu_kernels.py tune --shape MiMo-V2-Flash --dtype fp8 --out tuned.json

A layer is: top-k choice from logits, row lists, quantisation, two grouped GEMMs with SwiGLU between, weighted
sum over the lanes. Bytes counted: the weights of the experts that are hit. FLOP: 6 * h * i * tokens * k.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import time_graph

from interlock.kernels.triton import moe
from interlock.kernels.triton.row_blocks import reference_quantise
from interlock.kernels.triton.tuned import MoeConfig

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


def random_weights(shape: str, dtype: str, seed: int = 0) -> moe.ExpertTensors:
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
    return moe.ExpertTensors(gate_up, down, gate_up_scales, down_scales)


def random_inputs(shape: str, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x bfloat16 [tokens, h] and logits float32 [tokens, all experts]: uniform routing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = SHAPES[shape][1]
    routed = ROUTED.get(shape, SHAPES[shape][0])
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).to(torch.bfloat16)
    return x, torch.randn(tokens, routed, device="cuda", generator=generator)


def layer(
    x: torch.Tensor, logits: torch.Tensor, weights: moe.ExpertTensors, config: MoeConfig
) -> torch.Tensor:
    """The whole MoE layer after the router's matrix product."""
    experts = weights.down.shape[0]
    ids, factors = moe.top_k(logits, None, TOP_K, sigmoid=True, normalise=True)
    if logits.shape[1] != experts:
        ids = torch.where(ids < experts, ids, -1)
    lists = moe.token_lists(ids, factors, experts, config.block_rows)
    lanes = torch.empty(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    moe.compute(x, None, weights, lists, lanes.flatten(0, 1), config)
    return moe.sum_lanes(lanes, ids, x.dtype)


def reference_layer(x: torch.Tensor, logits: torch.Tensor, weights: moe.ExpertTensors) -> torch.Tensor:
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
        gate, up = (x[rows] @ _wide(weights.gate_up, weights.gate_up_scales, expert).T).chunk(2, dim=1)
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
    def count(shape: str, logits: list[torch.Tensor], weights: moe.ExpertTensors) -> Work:
        experts, hidden, inter = SHAPES[shape]
        each = weights.gate_up[0].nbytes + weights.down[0].nbytes
        hit, rows = 0, 0
        for one in logits:
            ids = one.topk(TOP_K).indices
            ids = ids[ids < experts]
            hit += ids.unique().numel()
            rows += ids.numel()
        return Work(hit * each / len(logits), 6.0 * hidden * inter * rows / len(logits))


def time_layer(shape: str, tokens: int, weights: moe.ExpertTensors, config: MoeConfig) -> dict[str, object]:
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


def check_layer(shape: str, tokens: int, weights: moe.ExpertTensors, config: MoeConfig) -> float:
    x, logits = random_inputs(shape, tokens, 7 + tokens)
    return relative_error(layer(x, logits, weights, config), reference_layer(x, logits, weights))
