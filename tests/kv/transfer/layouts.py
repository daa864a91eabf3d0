"""Layouts and pools for transfer tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlock.kv.transfer.layout import CacheLayout, LayerLayout
from interlock.parallel.sharding import kv_heads_of

WINDOW = 8


def layout(
    *,
    attn_tp: int = 1,
    page_size: int = 4,
    kinds: str = "fwwf",
    heads: Sequence[int] = (2, 4),
    pages: int = 40,
    dtype: str = "float32",
    layers: Sequence[int] | None = None,
) -> CacheLayout:
    """``kinds``: f for a full layer with ``heads[0]`` heads, w for a sliding one with ``heads[1]``."""
    numbers = range(len(kinds)) if layers is None else layers
    return CacheLayout(
        model="m",
        dtype=dtype,
        page_size=page_size,
        attn_tp=attn_tp,
        full_pages=pages if "f" in kinds else 0,
        window_pages=pages if "w" in kinds else 0,
        window=WINDOW if "w" in kinds else None,
        layers=tuple(
            LayerLayout(n, WINDOW if kind == "w" else None, heads[kind == "w"], 24, 16)
            for n, kind in zip(numbers, kinds, strict=True)
        ),
    )


def pools(each: CacheLayout) -> list[torch.Tensor]:
    """One rank's zero-filled buffers, uint8."""
    return [torch.zeros(size, dtype=torch.uint8) for size in each.sizes()]


def rows(each: CacheLayout, buffers: Sequence[torch.Tensor], index: int, rank: int) -> torch.Tensor:
    """Buffer ``index`` as float32 [rows, heads of the rank, width]."""
    layer, kind = each.buffers[index]
    heads = len(kv_heads_of(layer.kv_heads, each.attn_tp, rank))
    return buffers[index].view(torch.float32).view(-1, heads, layer.width(kind))


def code(layer: int, kind: str, head: int, token: int) -> float:
    """What the test's cache holds in every channel; exact in float32."""
    return float(1 + token + 512 * (head + 8 * (layer + 8 * "kv".index(kind))))
