"""Rotary embedding of queries and keys, value scale, and the write into the paged cache, in one launch.

Queries are rotated where they are: of 192 channels of which 64 are rotated, a third is read and written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlock.kernels.triton.row_blocks import power_of_two

FEW_ROWS = 2048
"""Rows (token, query head) up to which a program takes few, so that there are programs enough."""


@triton.jit
def _rotate(x, y, row, first, held, angles, half: tl.constexpr, half_padded: tl.constexpr):
    """Half-split rotation, in float32, of the first 2 * half channels from x + row to y + first; angles point
    to each row's cosines."""
    channel = tl.arange(0, half_padded)
    mask = held[:, None] & (channel[None, :] < half)
    cos = tl.load(angles[:, None] + channel[None, :], mask=mask, other=0.0)
    sin = tl.load(angles[:, None] + half + channel[None, :], mask=mask, other=0.0)
    source = x + row[:, None] + channel[None, :]
    lower = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    goal = y + first[:, None] + channel[None, :]
    tl.store(goal, (lower * cos - upper * sin).to(y.dtype.element_ty), mask=mask)
    tl.store(goal + half, (upper * cos + lower * sin).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _store_keys(
    program, k, positions, cos_sin, slots, k_cache, tokens, k_row, k_head, k_slot,
    kv_heads: tl.constexpr, width: tl.constexpr, half: tl.constexpr, half_padded: tl.constexpr,
    rest_padded: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    line = program * tile + tl.arange(0, tile)
    token = (line // kv_heads).to(tl.int64)
    head = line % kv_heads
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    held = slot >= 0
    angles = cos_sin + tl.load(positions + token, mask=held, other=0) * (2 * half)
    row = token * k_row + head * k_head
    first = slot * k_slot + head * width
    _rotate(k, k_cache, row, first, held, angles, half, half_padded)
    if 2 * half < width:
        channel = 2 * half + tl.arange(0, rest_padded)
        mask = held[:, None] & (channel[None, :] < width)
        rest = tl.load(k + row[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        goal = k_cache + first[:, None] + channel[None, :]
        tl.store(goal, rest.to(k_cache.dtype.element_ty), mask=mask)


@triton.jit
def _store_values(
    program, v, slots, v_cache, value_scale, tokens, v_row, v_head, v_slot,
    kv_heads: tl.constexpr, value_width: tl.constexpr, value_padded: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    line = program * tile + tl.arange(0, tile)
    token = (line // kv_heads).to(tl.int64)
    head = line % kv_heads
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    inner = tl.arange(0, value_padded)
    mask = (slot >= 0)[:, None] & (inner[None, :] < value_width)
    source = v + (token * v_row + head * v_head)[:, None] + inner[None, :]
    value = tl.load(source, mask=mask, other=0.0).to(tl.float32) * value_scale
    goal = v_cache + (slot * v_slot + head * value_width)[:, None] + inner[None, :]
    tl.store(goal, value.to(v.dtype.element_ty).to(v_cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "query_programs", "key_programs"])
def rope_and_store_kernel(
    q, k, v, positions, cos_sin, slots, k_cache, v_cache, value_scale,
    tokens, query_programs, key_programs, q_row, q_head, k_row, k_head, v_row, v_head, k_slot, v_slot,
    heads: tl.constexpr, kv_heads: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
    half: tl.constexpr, half_padded: tl.constexpr, rest_padded: tl.constexpr, value_padded: tl.constexpr,
    tile: tl.constexpr, kv_tile: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of rows (token, head) of the queries, then of the keys, then of the values."""
    program = tl.program_id(0)
    if program < query_programs:
        line = program * tile + tl.arange(0, tile)
        token = (line // heads).to(tl.int64)
        held = token < tokens
        angles = cos_sin + tl.load(positions + token, mask=held, other=0) * (2 * half)
        row = token * q_row + (line % heads) * q_head
        _rotate(q, q, row, row, held, angles, half, half_padded)
    elif program < query_programs + key_programs:
        _store_keys(
            program - query_programs, k, positions, cos_sin, slots, k_cache, tokens, k_row, k_head, k_slot,
            kv_heads, width, half, half_padded, rest_padded, kv_tile,
        )  # fmt: skip
    else:
        _store_values(
            program - query_programs - key_programs, v, slots, v_cache, value_scale, tokens,
            v_row, v_head, v_slot, kv_heads, value_width, value_padded, kv_tile,
        )  # fmt: skip


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
    """See ``Kernels.rope_and_store``; q is rotated in place and returned."""
    tokens, heads, width = q.shape
    kv_heads, value_width = k.shape[1], v.shape[2]
    half = cos_sin.shape[1] // 2
    few = tokens * heads <= FEW_ROWS
    tile, kv_tile = (32, 8) if few else (128, 32)
    if tokens:
        query_programs, key_programs = -(-tokens * heads // tile), -(-tokens * kv_heads // kv_tile)
        rope_and_store_kernel[(query_programs + 2 * key_programs,)](
            q, k, v, positions, cos_sin, slots, k_cache, v_cache, value_scale,
            tokens, query_programs, key_programs,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_cache.stride(1), v_cache.stride(1),
            heads=heads, kv_heads=kv_heads, width=width, value_width=value_width, half=half,
            half_padded=power_of_two(half), rest_padded=power_of_two(max(1, width - 2 * half)),
            value_padded=power_of_two(value_width), tile=tile, kv_tile=kv_tile, num_warps=4,
        )  # fmt: skip
    return q
