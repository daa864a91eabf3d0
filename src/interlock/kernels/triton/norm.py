"""RMS norm, alone or with the residual sum before it and quantisation after it; SwiGLU of a fused gate_up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlock.kernels.triton.expert_tensors import GROUP
from interlock.kernels.triton.quantise import to_fp8
from interlock.kernels.triton.row_blocks import power_of_two


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, new_residual, out_scales, eps, x_stride, residual_stride, scale_stride,
    width: tl.constexpr, padded: tl.constexpr, adds: tl.constexpr, quantises: tl.constexpr,
):  # fmt: skip
    """One row: optional sum (rounded to x's dtype), norm in float32 rounded to x's dtype, times weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    inside = column < width
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(new_residual + row * width + column, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    result = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if quantises:
        tile = tl.reshape(result.to(dtype).to(tl.float32), [padded // 128, 128])
        quantised, scales = to_fp8(tile, 1)
        tl.store(out + row * width + column, tl.reshape(quantised, [padded]), mask=inside)
        group = tl.arange(0, padded // 128)
        tl.store(out_scales + group.to(tl.int64) * scale_stride + row, scales, mask=group * 128 < width)
    else:
        tl.store(out + row * width + column, result.to(dtype), mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up, out, stride, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ``Kernels.rms_norm``; x [..., h] with dense rows of any stride."""
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        width = rows.shape[1]
        rms_norm_kernel[(rows.shape[0],)](
            rows, None, weight, out, None, None, eps, rows.stride(0), 0, 0,
            width=width, padded=power_of_two(width), adds=False, quantises=False, num_warps=_warps(width),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``Kernels.add_rms_norm``."""
    out, new_residual, _ = _add_rms_norm(x, residual, weight, eps, quantises=False)
    return out, new_residual


def add_rms_norm_quantised(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` whose first result is e4m3 [n, h] with scales float32 [h / 128, n] (h in 128s)."""
    out, new_residual, scales = _add_rms_norm(x, residual, weight, eps, quantises=True)
    assert scales is not None
    return out, scales, new_residual


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, quantises: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    rows, others = _rows(x), _rows(residual)
    count, width = rows.shape
    dtype = torch.float8_e4m3fn if quantises else x.dtype
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(width // GROUP, count, device=x.device) if quantises else None
    if count:
        rms_norm_kernel[(count,)](
            rows, others, weight, out, new_residual, scales, eps, rows.stride(0), others.stride(0), count,
            width=width, padded=power_of_two(width), adds=True, quantises=quantises, num_warps=_warps(width),
        )  # fmt: skip
    return out, new_residual, scales


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``Kernels.silu_and_mul``."""
    rows = _rows(gate_up)
    width = rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        block = min(2048, power_of_two(width))
        silu_and_mul_kernel[(rows.shape[0], -(-width // block))](
            rows, out, rows.stride(0), width, block=block, num_warps=4
        )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8
