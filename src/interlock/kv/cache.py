"""The tensors of the paged key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from interlock.errors import StartupError
from interlock.plan.card import AttentionCard
from interlock.plan.launch_plan import LaunchPlan

CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}

Storage = Callable[[Sequence[int]], list[torch.Tensor]]


def cache_dtype_name(dtype: torch.dtype) -> str:
    """The plan's name of a dtype: "fp8_e4m3" of ``torch.float8_e4m3fn``."""
    return next((name for name, held in CACHE_DTYPES.items() if held is dtype), str(dtype))


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer: k [pages, page_size, kvh_local, head_dim], v [pages, page_size, kvh_local, v_head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers held by this rank."""

    layers: tuple[LayerCache, ...]

    def buffers(self) -> list[torch.Tensor]:
        """k and v of each layer as flat uint8 views, in that order."""
        return [each.view(torch.uint8).view(-1) for layer in self.layers for each in (layer.k, layer.v)]

    @property
    def nbytes(self) -> int:
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)


def local_kv_heads(card: AttentionCard, attn_tp_size: int) -> int:
    """Key-value heads that one attention-TP rank holds; heads are replicated when ranks outnumber them."""
    heads = card.num_kv_heads
    if heads % attn_tp_size == 0:
        return heads // attn_tp_size
    if attn_tp_size % heads == 0:
        return 1
    raise StartupError(
        f"{heads} key-value heads cannot be spread over {attn_tp_size} attention-TP ranks: "
        "one number must divide the other"
    )


def layer_shapes(plan: LaunchPlan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of k and v of each layer. Raises ``StartupError`` for sizes that cannot be allocated."""
    if plan.page_size < 1:
        raise StartupError(f"page_size is {plan.page_size}; a page holds at least 1 token")
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for index, layer in enumerate(plan.card.layers):
        attention = layer.attention
        name, pages = (
            ("full_pages", plan.full_pages)
            if attention.window is None
            else ("window_pages", plan.window_pages)
        )
        if pages < 1:
            raise StartupError(f"layer {index} keeps its keys in {name}, which the plan sets to {pages}")
        heads = local_kv_heads(attention, plan.attn_tp_size)
        rows = (pages, plan.page_size, heads)
        shapes.append(((*rows, attention.head_dim), (*rows, attention.v_head_dim)))
    return shapes


def allocate(plan: LaunchPlan, device: torch.device | str, storage: Storage | None = None) -> KVCache:
    """Allocate the cache of one rank, zero-filled so that no unwritten row can hold a NaN.

    Args:
        storage: gives zero-filled uint8 buffers of given sizes; by default they are plain memory.

    Raises:
        StartupError: the dtype is unknown, a size is not positive, or the bytes exceed what is available.
    """
    dtype = CACHE_DTYPES.get(plan.kv_cache_dtype)
    if dtype is None:
        raise StartupError(f"kv_cache_dtype {plan.kv_cache_dtype!r}: known are {', '.join(CACHE_DTYPES)}")
    shapes = layer_shapes(plan)
    rows = [shape for pair in shapes for shape in pair]
    needed = sum(torch.Size(shape).numel() for shape in rows) * dtype.itemsize
    available = plan.memory.available
    if available > 0 and needed > available:
        raise StartupError(
            f"the key-value cache needs {needed} bytes and {available} are available; "
            "lower --max-model-len or --max-running-requests"
        )
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in rows]
    if storage is None:
        buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    else:
        buffers = storage(sizes)
    tensors = [buffer.view(dtype).view(shape) for buffer, shape in zip(buffers, rows, strict=True)]
    return KVCache(tuple(LayerCache(k=k, v=v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)))
