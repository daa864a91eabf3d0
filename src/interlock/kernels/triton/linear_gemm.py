"""A dense block-fp8 GEMM for few rows: weights stream past a block of tokens, split over K where N is
small."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_fp8_kernel(
    x, x_scales, weight, weight_scales, out, rows, scale_stride, out_row_stride, split_stride,
    depth: tl.constexpr, width: tl.constexpr, block_rows: tl.constexpr, block_n: tl.constexpr,
    splits: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """out[split, r, :] = x[r, part] @ weight[:, part].T; x e4m3 [rows, K], x_scales [K / 128, rows].

    weight is a descriptor over e4m3 [N, K] in tiles [block_n, 128], weight_scales float32 [N / 128, K / 128].
    """
    tiles: tl.constexpr = (width + block_n - 1) // block_n
    column = tl.program_id(0) % tiles * block_n
    first = tl.program_id(0) // tiles * block_rows
    split = tl.program_id(1)
    row = first + tl.arange(0, block_rows)
    live = row < rows
    safe = tl.where(live, row, first)
    groups: tl.constexpr = depth // 128
    share: tl.constexpr = (groups + splits - 1) // splits
    tokens = x + safe[:, None].to(tl.int64) * depth + tl.arange(0, 128)[None, :]
    scales = weight_scales + column // 128 * groups
    total = tl.zeros([block_n, block_rows], tl.float32)
    for step in tl.range(split * share, tl.minimum(groups, (split + 1) * share), num_stages=stages):
        scale = tl.load(x_scales + safe + step.to(tl.int64) * scale_stride) * tl.load(scales + step)
        tile = tl.load(tokens + step * 128).T
        total += tl.dot(weight.load([column, step * 128]), tile) * scale[None, :]
    out_column = column + tl.arange(0, block_n)
    where = out + split.to(tl.int64) * split_stride + row[:, None].to(tl.int64) * out_row_stride
    mask = live[:, None] & (out_column[None, :] < width)
    tl.store(where + out_column[None, :], total.T.to(out.dtype.element_ty), mask=mask)
