"""Rotary embedding of queries and keys, value scale, and the write into the paged cache, in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlock.kernels.triton.row_blocks import power_of_two

HEADS_A_PROGRAM = 16


@triton.jit
def _rotated(x, head, channel, mask, angles, stride, half: tl.constexpr):
    """Half-split rotation of the first 2 * half channels of a tile [heads, channels], in float32."""
    where = x + head[:, None] * stride
    value = tl.load(where + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = channel < 2 * half
    first = channel < half
    partner = tl.where(first, channel + half, channel - half)
    other = tl.load(where + partner[None, :], mask=mask & turned[None, :], other=0.0).to(tl.float32)
    frequency = tl.where(first, channel, channel - half)
    cos = tl.load(angles + frequency, mask=turned, other=1.0)
    sin = tl.load(angles + half + frequency, mask=turned, other=0.0)
    return value * cos[None, :] + other * tl.where(first, -sin, sin)[None, :]


@triton.jit
def rope_and_store_kernel(
    q, k, v, positions, cos_sin, slots, k_cache, v_cache, out, value_scale,
    q_row, q_head, k_row, k_head, v_row, v_head, k_slot, v_slot,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    padded: tl.constexpr, value_padded: tl.constexpr, half: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Programs (token, part): query tiles of heads first, then key tiles, then value tiles."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (heads + tile - 1) // tile
    key_parts: tl.constexpr = (kv_heads + tile - 1) // tile
    channel = tl.arange(0, padded)
    angles = cos_sin + tl.load(positions + token) * (2 * half)
    if part < query_parts:
        head = part * tile + tl.arange(0, tile)
        mask = (head[:, None] < heads) & (channel[None, :] < width)
        result = _rotated(q + token * q_row, head, channel, mask, angles, q_head, half)
        where = out + (token * heads + head[:, None]) * width + channel[None, :]
        tl.store(where, result.to(out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            if part < query_parts + key_parts:
                head = (part - query_parts) * tile + tl.arange(0, tile)
                mask = (head[:, None] < kv_heads) & (channel[None, :] < width)
                result = _rotated(k + token * k_row, head, channel, mask, angles, k_head, half)
                where = k_cache + slot * k_slot + head[:, None] * width + channel[None, :]
                tl.store(where, result.to(k_cache.dtype.element_ty), mask=mask)
            else:
                head = (part - query_parts - key_parts) * tile + tl.arange(0, tile)
                inner = tl.arange(0, value_padded)
                held = (head[:, None] < kv_heads) & (inner[None, :] < value_width)
                value = tl.load(
                    v + token * v_row + head[:, None] * v_head + inner[None, :], mask=held, other=0.0
                )
                goal = v_cache + slot * v_slot + head[:, None] * value_width + inner[None, :]
                scaled = value.to(tl.float32) * value_scale
                tl.store(goal, scaled.to(v.dtype.element_ty).to(v_cache.dtype.element_ty), mask=held)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    value_scale: float,
) -> torch.Tensor:
    """See ``Kernels.rope_and_store``."""
    tokens, heads, width = q.shape
    kv_heads, value_width = k.shape[1], v.shape[2]
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    tile = min(HEADS_A_PROGRAM, power_of_two(max(heads, kv_heads)))
    parts = -(-heads // tile) + 2 * -(-kv_heads // tile)
    if tokens:
        rope_and_store_kernel[(tokens, parts)](
            q, k, v, positions, cos_sin, slots, k_cache, v_cache, out, value_scale,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(1), v_cache.stride(1),
            heads=heads, kv_heads=kv_heads, width=width, value_width=value_width,
            padded=power_of_two(width), value_padded=power_of_two(value_width),
            half=cos_sin.shape[1] // 2, tile=tile, num_warps=4,
        )  # fmt: skip
    return out
