"""Linear layers on the GPU: bfloat16 through the vendor's library, block-fp8 weights through our own
kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear as dense_linear
from triton.tools.tensor_descriptor import TensorDescriptor

from interlock.kernels.base import PackedWeight
from interlock.kernels.triton import pipelined
from interlock.kernels.triton.expert_tensors import GROUP, quantise_blocks
from interlock.kernels.triton.fp8_rows import quantise_rows
from interlock.kernels.triton.linear_gemm import linear_fp8_kernel
from interlock.kernels.triton.row_blocks import power_of_two

MULTIPROCESSORS = 132
PIPELINED_ROWS = 512


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


def linear(x: torch.Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """See ``Kernels.linear``; fp8 weights quantise x per row in groups of 128."""
    out_dtype = out_dtype or x.dtype
    if isinstance(weight.data, Fp8Weight):
        return linear_fp8(*quantise_rows(x), weight, out_dtype)
    if x.dtype != weight.dtype:
        return dense_linear(x.float(), weight.data.float()).to(out_dtype)
    if out_dtype == torch.float32 and x.dtype == torch.bfloat16 and x.is_cuda:
        return torch.mm(x, weight.data.T, out_dtype=torch.float32)
    return dense_linear(x, weight.data).to(out_dtype)


def linear_fp8(
    x: torch.Tensor, x_scales: torch.Tensor, weight: PackedWeight, out_dtype: torch.dtype
) -> torch.Tensor:
    """x e4m3 [n, K] with x_scales float32 [K / 128, n] -> [n, N], float32 accumulation, rounded once."""
    rows, width, depth = x.shape[0], weight.out_features, weight.in_features
    out = torch.empty(rows, width, dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    data: Fp8Weight = weight.data
    if rows >= PIPELINED_ROWS and width % pipelined.COLUMNS == 0:
        pipelined.dense(x, x_scales, data.weight, data.scales, out)
        return out
    block_rows = max(16, min(64, power_of_two(rows)))
    block_n = 64 if width // 128 * -(-rows // block_rows) < 2 * MULTIPROCESSORS else 128
    tiles = -(-width // block_n) * -(-rows // block_rows)
    splits = max(1, min(4, depth // 1024, 2 * MULTIPROCESSORS // tiles))
    target = out if splits == 1 else torch.empty(splits, rows, width, dtype=torch.float32, device=x.device)
    linear_fp8_kernel[(tiles, splits)](
        x, x_scales, TensorDescriptor.from_tensor(data.weight, [block_n, GROUP]), data.scales, target,
        rows, x_scales.stride(0), width, rows * width, depth=depth, width=width, block_rows=block_rows,
        block_n=block_n, splits=splits, stages=4, num_warps=4 if block_rows < 64 else 8,
    )  # fmt: skip
    return out if splits == 1 else target.sum(0).to(out_dtype)
