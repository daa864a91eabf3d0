"""Activations to fp8 (e4m3) with one float32 scale for each token and 128 channels.

Scales are stored channel-group first, [h / 128, rows], so that a GEMM reads the scales of neighbouring rows
from one cache line. Reference: ``row_blocks.reference_quantise``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def to_fp8(values, axis: tl.constexpr):
    """(e4m3 values, float32 scales): scale = max |x| / 448 along ``axis`` of a two-dimensional tile."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=axis), 1e-12) / FP8_MAX
    scaled = values / tl.expand_dims(scale, axis)
    return tl.clamp(scaled, -FP8_MAX, FP8_MAX).to(tl.float8e4nv), scale


@triton.jit
def quantise_part(
    x, out, scales, row, part, row_stride, width: tl.constexpr, groups: tl.constexpr, scale_stride
):
    """The ``part``-th ``groups`` groups of one row (int64) of ``quantise_kernel``."""
    group = part * groups + tl.arange(0, groups)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = column < width
    values = tl.load(x + row * row_stride + column, mask=live, other=0.0).to(tl.float32)
    quantised, scale = to_fp8(values, 1)
    tl.store(out + row * width + column, quantised, mask=live)
    tl.store(scales + group.to(tl.int64) * scale_stride + row, scale, mask=group * 128 < width)


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def quantise_kernel(
    x, out, scales, rows, row_stride, width: tl.constexpr, groups: tl.constexpr, scale_stride
):
    """x [rows, width] -> out e4m3 [rows, width], scales [width / 128, scale_stride]."""
    row = tl.program_id(0).to(tl.int64)
    quantise_part(x, out, scales, row, tl.program_id(1), row_stride, width, groups, scale_stride)


@triton.jit(do_not_specialize=["scale_stride"])
def quantise_to_places_kernel(
    x,
    places,
    out,
    scales,
    row_stride,
    lanes: tl.constexpr,
    width: tl.constexpr,
    groups: tl.constexpr,
    scale_stride,
):
    """Quantise a token once and write it at the place of each of its lanes (-1: nowhere)."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = column < width
    values = tl.load(x + token * row_stride + column, mask=live, other=0.0).to(tl.float32)
    quantised, scale = to_fp8(values, 1)
    for lane in tl.static_range(lanes):
        place = tl.load(places + token * lanes + lane)
        held = place >= 0
        tl.store(out + place.to(tl.int64) * width + column, quantised, mask=live & held)
        where = scales + group.to(tl.int64) * scale_stride + place
        tl.store(where, scale, mask=(group * 128 < width) & held)
