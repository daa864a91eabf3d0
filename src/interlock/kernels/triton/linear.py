"""Linear layers on the GPU: block-fp8 weights through our own kernels, bfloat16 through the vendor's library
except where ours read a weight faster (few rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear as dense_linear

from interlock.kernels.base import PackedWeight
from interlock.kernels.triton.dense_products import DenseProducts
from interlock.kernels.triton.expert_tensors import GROUP, quantise_blocks
from interlock.kernels.triton.fp8_rows import quantise_rows
from interlock.kernels.triton.linear_launch import launch
from interlock.kernels.triton.tuned_linear import Library, LinearConfig, LinearShape, Tiles, choose


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """weight e4m3 [N, K], scales float32 [ceil(N / 128), K / 128]; value = weight * scale of its block."""

    weight: torch.Tensor
    scales: torch.Tensor


def pack_fp8(weight: torch.Tensor, scales: torch.Tensor | None = None) -> PackedWeight:
    """Pack e4m3 [N, K] with block scales, or quantise a float weight; K must be a multiple of 128."""
    rows, depth = weight.shape
    if depth % GROUP:
        raise ValueError(f"a block-fp8 weight needs a multiple of {GROUP} input features, got {depth}")
    if scales is None:
        weight, scales = quantise_blocks(weight)
    data = Fp8Weight(weight.contiguous(), scales.to(torch.float32).contiguous())
    return PackedWeight(rows, depth, torch.float8_e4m3fn, data, data.weight.nbytes + data.scales.nbytes)


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    out_dtype: torch.dtype | None = None,
    products: DenseProducts | None = None,
) -> torch.Tensor:
    """See ``Kernels.linear``; fp8 weights quantise x per row in groups of 128."""
    out_dtype = out_dtype or x.dtype
    if isinstance(weight.data, Fp8Weight):
        return linear_fp8(*quantise_rows(x), weight, out_dtype, products)
    if x.dtype != weight.dtype:
        return dense_linear(x.float(), weight.data.float()).to(out_dtype)
    if x.dtype == torch.bfloat16 and x.is_cuda and x.dim() == 2:
        return _linear_bf16(x, weight.data, out_dtype)
    return dense_linear(x, weight.data).to(out_dtype)


def linear_fp8(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: PackedWeight,
    out_dtype: torch.dtype,
    products: DenseProducts | None = None,
) -> torch.Tensor:
    """x e4m3 [n, K] with x_scales float32 [K / 128, n] -> [n, N], float32 accumulation, rounded once.

    products: taken where the table says so and they are compiled for n rows.
    """
    rows, data = x.shape[0], weight.data
    if rows == 0:
        return torch.empty(0, weight.out_features, dtype=out_dtype, device=x.device)
    config = choose(LinearShape(weight.out_features, weight.in_features, "fp8"), rows)
    assert not isinstance(config, Library), "the vendor's library computes no block-fp8 linears"

    def own() -> torch.Tensor:
        return launch(config, x, x_scales, data.weight, data.scales, out_dtype)

    if products is not None and out_dtype == torch.bfloat16 and _prefers_products(config, rows):
        out = products.dense(x, x_scales, data.weight, data.scales, own)
        if out is not None:
            return out
    return own()


def _prefers_products(config: LinearConfig, rows: int) -> bool:
    return isinstance(config, Tiles) and 0 < config.deep_gemm_from <= rows


def _linear_bf16(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    config = choose(LinearShape(weight.shape[0], weight.shape[1], "bfloat16"), max(1, x.shape[0]))
    if x.shape[0] and not isinstance(config, Library) and weight.is_contiguous() and _aligned(x, weight):
        return launch(config, x.contiguous(), None, weight, None, out_dtype)
    if out_dtype == torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return dense_linear(x, weight).to(out_dtype)


def _aligned(*tensors: torch.Tensor) -> bool:
    """Whether the bulk copy engine can read them: 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
