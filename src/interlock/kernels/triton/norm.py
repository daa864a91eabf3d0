"""RMS norm, alone or with the residual sum before it and quantisation after it; SwiGLU of a fused gate_up."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from interlock.kernels.base import QuantisedRows
from interlock.kernels.triton.expert_tensors import GROUP
from interlock.kernels.triton.quantise import to_fp8
from interlock.kernels.triton.row_blocks import power_of_two

GROUPS_A_PROGRAM = 8


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, new_residual, out_scales, eps, x_stride, residual_stride, scale_stride,
    width: tl.constexpr, padded: tl.constexpr, adds: tl.constexpr, quantises: tl.constexpr,
    announces: tl.constexpr,
):  # fmt: skip
    """One row: optional sum (rounded to x's dtype), norm in float32 rounded to x's dtype, times weight.

    announces: a linear that follows may start, which reads its weight ahead and then waits for the end.
    """
    if announces:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    inside = column < width
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(dtype)
        tl.store(new_residual + row * width + column, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    result = normed * factor
    if quantises:
        tile = tl.reshape(result.to(dtype).to(tl.float32), [padded // 128, 128])
        quantised, scales = to_fp8(tile, 1)
        tl.store(out + row * width + column, tl.reshape(quantised, [padded]), mask=inside)
        group = tl.arange(0, padded // 128)
        tl.store(out_scales + group.to(tl.int64) * scale_stride + row, scales, mask=group * 128 < width)
    else:
        tl.store(out + row * width + column, result.to(dtype), mask=inside)


@triton.jit
def silu_and_mul_quantised_kernel(
    gate_up, out, scales, stride, width, scale_stride, groups: tl.constexpr, announces: tl.constexpr
):
    """As ``silu_and_mul_kernel``, rounded to gate_up's dtype, then e4m3 with scales [width / 128, rows]."""
    if announces:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    quantised, scale = to_fp8(result, 1)
    tl.store(out + row * width + column, quantised, mask=inside)
    tl.store(scales + group.to(tl.int64) * scale_stride + row, scale, mask=group * 128 < width)


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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, None, weight, eps, out, None, None)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``Kernels.add_rms_norm``."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_rms_norm(x, residual, weight, eps, out, total, None)
    return out, total


def add_rms_norm_quantised(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[QuantisedRows, torch.Tensor]:
    """See ``QuantisingKernels.add_rms_norm_quantised``."""
    count, width = x.shape
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width // GROUP, count, dtype=torch.float32, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, residual, weight, eps, out, total, scales)
    return QuantisedRows(out, scales, x.dtype), total


def _launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    rows = _rows(x)
    others = None if residual is None else _rows(residual)
    count, width = rows.shape
    if count:
        rms_norm_kernel[(count,)](
            rows, others, weight, out, total, scales, eps,
            rows.stride(0), 0 if others is None else others.stride(0), count,
            width=width, padded=power_of_two(width), adds=others is not None, quantises=scales is not None,
            announces=x.is_cuda, num_warps=_warps(width),
        )  # fmt: skip


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


def silu_and_mul_quantised(gate_up: torch.Tensor) -> QuantisedRows:
    """See ``QuantisingKernels.silu_and_mul_quantised``."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty(width // GROUP, count, dtype=torch.float32, device=gate_up.device)
    if count:
        groups = min(GROUPS_A_PROGRAM, power_of_two(width // GROUP))
        silu_and_mul_quantised_kernel[(count, -(-width // (GROUP * groups)))](
            gate_up, out, scales, gate_up.stride(0), width, count, groups=groups,
            announces=gate_up.is_cuda, num_warps=4,
        )  # fmt: skip
    return QuantisedRows(out, scales, gate_up.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8
