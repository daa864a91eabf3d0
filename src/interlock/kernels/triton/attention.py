"""Launches of paged attention; the kernels are in ``attention_kernels.py``."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from interlock.kernels.triton.attention_kernels import attention_kernel, merge_kernel
from interlock.kernels.triton.attention_tiles import PLAIN, AttentionTile, Phase, load_table
from interlock.kernels.triton.pipelined_attention import pipelined_attention_kernel
from interlock.kernels.triton.row_blocks import power_of_two

TUNED_CHANNELS = 320
"""Query and value channels of a head, together, up to which tuned tiles fit into shared memory."""


PIPELINED_ROWS = 128
"""Query rows of a tile of ``pipelined_attention.py``."""
PIPELINED_BYTES = 200 * 1024
"""Shared memory that its stages and queries may take; what is left is for barriers and layout changes."""


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


def fits_pipeline(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether ``pipelined_attention.py`` computes these shapes and dtypes."""
    heads, width = q.shape[1:]
    page_size, kv_heads, value_width = v_cache.shape[1:]
    group = heads // kv_heads
    dtypes = {q.dtype, k_cache.dtype, v_cache.dtype}
    dense = k_cache.is_contiguous() and v_cache.is_contiguous()
    dense = dense and q.stride(1) % 8 == q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0
    sizes = width in (64, 128, 192) and value_width == 128 and page_size % 16 == 0
    return dtypes == {torch.bfloat16} and dense and sizes and group == power_of_two(group) <= 128


def _pipelined(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    tile: AttentionTile,
) -> torch.Tensor:
    """Prefill by persistent programs; the tile's rows and warps are fixed there."""
    tokens, heads, width = q.shape
    page_size, kv_heads, value_width = v_cache.shape[1:]
    out = torch.empty(tokens, heads, value_width, dtype=q.dtype, device=q.device)
    places = tokens // (PIPELINED_ROWS // (heads // kv_heads)) + kv_len.shape[0]
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    box = [16, 64]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    k, v = (TensorDescriptor.from_tensor(c.flatten(0, 1).flatten(1), box, layout) for c in (k_cache, v_cache))
    group = heads // kv_heads
    rows = [max(1, PIPELINED_ROWS // 2 // group), min(group, PIPELINED_ROWS // 2), box[1]]
    queries = TensorDescriptor.from_tensor(q, rows, gl.NVMMASharedLayout.get_default_for(rows, gl.bfloat16))
    pipelined_attention_kernel[(min(programs, places * kv_heads),)](
        queries, k, v, page_table, query_start, kv_len, sinks, out,
        scale, window or 0, tokens, kv_len.shape[0], places, page_table.stride(0),
        heads=heads, kv_heads=kv_heads, width=width, value_width=value_width, page_size=page_size,
        keys=tile.keys_a_step, stages=tile.stages, slots=_query_slots(width, value_width, tile),
        has_window=window is not None, has_sinks=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out


def _query_slots(width: int, value_width: int, tile: AttentionTile) -> int:
    """Tiles whose queries fit into shared memory beside the stages: two where they do, else one."""
    keys = tile.stages * tile.keys_a_step * (width + value_width) * 2
    queries = PIPELINED_ROWS * width * 2
    return 2 if keys + 2 * queries <= PIPELINED_BYTES else 1


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
    max_keys: int | None = None,
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
    if tile.specialised and not decode and fits_pipeline(q, k_cache, v_cache):
        return _pipelined(q, k_cache, v_cache, page_table, query_start, kv_len, scale, window, sinks, tile)
    rows = max(16 if decode else tile.rows, power_of_two(group))
    tokens_a_block = 1 if decode else max(1, rows // group)
    max_keys = max_keys or page_table.shape[1] * page_size
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
    attention_kernel[(blocks * kv_heads, splits)](
        q, k_cache, v_cache, page_table, query_start, kv_len, sinks, out, partial, stats,
        scale, window or 0, tokens, sequences, splits, page_table.stride(0), q.stride(0), q.stride(1),
        k_cache.stride(1), v_cache.stride(1),
        heads=heads, group=group, width=width, value_width=value_width, first_part=first, second_part=second,
        values=values, rows=rows, tokens_a_block=tokens_a_block, keys_a_step=tile.keys_a_step,
        page_size=page_size, has_splits=splits > 1, has_window=window is not None,
        has_sinks=sinks is not None, precision="ieee" if q.dtype == torch.float32 else "tf32",
        by_sequence=decode, aligned=tile.keys_a_step % page_size == 0 and not (decode and window is not None),
        ids_ahead=decode and tile.ids_ahead,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(tokens, heads)](
            partial, stats, sinks, query_start, out, tokens, sequences, splits,
            heads=heads, value_width=value_width, values=values, padded_splits=power_of_two(splits),
            has_sinks=sinks is not None, num_warps=1 if splits <= 8 else 4,
        )  # fmt: skip
    return out
