"""Launches of paged attention; the kernels are in ``attention_kernels.py``."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch

from interlock.kernels.triton.attention_kernels import attention_kernel, merge_kernel
from interlock.kernels.triton.attention_tiles import PLAIN, AttentionTile, Phase, load_table
from interlock.kernels.triton.row_blocks import power_of_two

TUNED_CHANNELS = 320
"""Query and value channels of a head, together, up to which tuned tiles fit into shared memory."""


def head_parts(width: int) -> tuple[int, int]:
    """Split a head size into powers of two for the matrix units: 192 -> (128, 64), 128 -> (128, 0)."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, 0 if rest <= 0 else max(16, power_of_two(rest))


def choose_tile(q: torch.Tensor, v_cache: torch.Tensor, sequences: int, *, windowed: bool) -> AttentionTile:
    """The tuned tile for these sizes; what was not tuned (float32, wide heads or groups) gets a plain one."""
    tokens, heads, width = q.shape
    kv_heads, value_width = v_cache.shape[2:]
    phase: Phase = "decode" if tokens <= sequences else "prefill"
    if q.dtype == torch.float32 or width + value_width > TUNED_CHANNELS or heads // kv_heads > 16:
        return PLAIN[phase]
    return load_table().nearest(phase, windowed, sequences * kv_heads if phase == "decode" else tokens)


def paged_attention(
    q: torch.Tensor,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """See ``Kernels.paged_attention``; ``scale`` must be positive. The cache may also be e4m3 (values without
    a scale). ``tile`` overrides the tuned launch parameters."""
    tokens, heads, width = q.shape
    page_size, kv_heads, value_width = v_cache.shape[1:]
    sequences, group = kv_len.shape[0], heads // kv_heads
    if tokens == 0 or sequences == 0:
        return torch.zeros(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    if scale <= 0:
        raise ValueError(f"scale: the kernel takes the largest score before it scales, got {scale}")
    decode = tokens <= sequences
    tile = tile or choose_tile(q, v_cache, sequences, windowed=window is not None)
    rows = max(16 if decode else tile.rows, power_of_two(group))
    tokens_a_block = 1 if decode else max(1, rows // group)
    max_keys = page_table.shape[1] * page_size
    if window is not None:
        max_keys = min(max_keys, window + tokens_a_block)
    splits = tile.key_splits(sequences * kv_heads, max_keys) if decode else 1
    out = torch.empty(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    partial = stats = None
    if splits > 1:
        partial = torch.empty(splits, tokens, heads, value_width, dtype=torch.float32, device=q.device)
        stats = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=q.device)
    first, second = head_parts(width)
    values = max(16, power_of_two(value_width))
    blocks = sequences if decode else tokens // tokens_a_block + sequences
    attention_kernel[(blocks, kv_heads, splits)](
        q, k_cache, v_cache, page_table, query_start, kv_len, sinks, out, partial, stats,
        scale, window or 0, tokens, sequences, splits, page_table.stride(0), q.stride(0), q.stride(1),
        k_cache.stride(1), v_cache.stride(1),
        heads=heads, group=group, width=width, value_width=value_width, first_part=first, second_part=second,
        values=values, rows=rows, tokens_a_block=tokens_a_block, keys_a_step=tile.keys_a_step,
        page_size=page_size, has_splits=splits > 1, has_window=window is not None,
        has_sinks=sinks is not None, precision="ieee" if q.dtype == torch.float32 else "tf32",
        by_sequence=decode, aligned=tile.keys_a_step % page_size == 0 and not (decode and window is not None),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tokens, heads)](
            partial, stats, sinks, query_start, out, tokens, sequences, splits,
            heads=heads, value_width=value_width, values=values, padded_splits=power_of_two(splits),
            has_sinks=sinks is not None, num_warps=1 if splits <= 8 else 4,
        )  # fmt: skip
    return out
