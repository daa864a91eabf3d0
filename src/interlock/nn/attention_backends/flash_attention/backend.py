"""Our paged cache through ``flash_attn_interface.flash_attn_with_kvcache``.

What the library does not have is made of what it gives: a *sink* is one more logit s without a value, so with
L the log of the sum of exponentials that it returns,

    softmax with the sink = softmax without * exp(L) / (exp(L) + exp(s)) = softmax without * sigmoid(L - s).

Legend: n tokens, s sequences, P pages in a page table, nh and kvh query and key-value heads, hd and vd widths
of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.nn.attention_backends.base import AttentionReceipt, AttentionSpec
from interlock.nn.attention_backends.flash_attention import BACKEND
from interlock.nn.attention_backends.flash_attention.step_memo import StepMemo

WithKVCache = Callable[..., Any]
FILLED = 132
"""Sequences times key-value heads that fill the GPU without splitting keys: SMs of an H100 or H200."""
LIBRARY_CHOOSES, UNSPLIT = 0, 1


class FlashAttention:
    """See ``PagedAttention``.

    Args:
        with_kvcache: ``flash_attn_interface.flash_attn_with_kvcache``, or what stands in for it.
    """

    def __init__(self, spec: AttentionSpec, with_kvcache: WithKVCache | None = None) -> None:
        self._with_kvcache = with_kvcache or load_with_kvcache()
        self._held: StepMemo[HeldPages] = StepMemo()
        self._padding: StepMemo[torch.Tensor] = StepMemo()
        self._calls = 0
        self._rows = 0
        self._sink_rows = 0

    def run(
        self,
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
    ) -> torch.Tensor:
        """See ``PagedAttention.run``; q, k_cache and v_cache have one dtype.

        ``max_seqlen_q`` is an upper bound: the exact one is known on the device only. The library chooses
        splits as for one sequence, and takes memory for as many of all rows; so it is told not to split where
        the sequences fill the GPU.
        """
        (tokens, heads), sequences = q.shape[:2], kv_len.shape[0]
        if tokens == 0 or sequences == 0:
            return q.new_zeros(tokens, heads, v_cache.shape[-1])
        self._calls += 1
        self._rows += tokens
        page_size = k_cache.shape[1]
        pages = HeldPages(page_table, kv_len)
        if window is not None:
            pages = self._held.of(page_table, lambda: held_pages(page_table, kv_len, page_size))
        out: torch.Tensor
        out, lse, *_ = self._with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=pages.kv_len,
            page_table=pages.table,
            cu_seqlens_q=query_start,
            max_seqlen_q=1 if tokens <= sequences else tokens,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            num_splits=UNSPLIT if sequences * k_cache.shape[2] >= FILLED else LIBRARY_CHOOSES,
            return_softmax_lse=True,
        )
        if sinks is not None:
            self._sink_rows += tokens
            apply_sinks(out, lse, sinks)
        padding = self._padding.of(query_start, lambda: padding_rows(tokens, query_start))
        return out.masked_fill_(padding, 0)

    def observed(self) -> AttentionReceipt:
        """What was called, and how often."""
        entry = self._with_kvcache
        return AttentionReceipt(
            name=BACKEND.name,
            entry=f"{entry.__module__}.{entry.__qualname__}",
            calls=self._calls,
            rows=self._rows,
            extra={"rows_with_sinks": self._sink_rows},
        )


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Page ids int32 [s, P] and the keys int32 [s] that lie in them, from the first page on."""

    table: torch.Tensor
    kv_len: torch.Tensor


def held_pages(page_table: torch.Tensor, kv_len: torch.Tensor, page_size: int) -> HeldPages:
    """Sequences without the pages in front of the first that is held.

    The library reads whole blocks of keys, so entries behind the window too, before it masks them; -1 would
    lead outside the cache. It aligns queries with the end of the keys, so keys may be missing in front.
    """
    first = (page_table >= 0).to(torch.int8).argmax(dim=1, keepdim=True)
    index = torch.arange(page_table.shape[1], device=page_table.device) + first
    table = page_table.gather(1, index.clamp_(max=page_table.shape[1] - 1))
    left_out = first.squeeze(1).to(torch.int32) * page_size
    return HeldPages(table, (kv_len - left_out).clamp_(min=0))


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Scale out [n, nh, vd] in place; lse float32 [nh, n], natural, and sinks float32 [nh].

    Computed in float32 and rounded once to out's dtype.
    """
    out.mul_(torch.sigmoid(lse.t() - sinks).unsqueeze(-1))


def padding_rows(tokens: int, query_start: torch.Tensor) -> torch.Tensor:
    """bool [n, 1, 1]: rows of no sequence, which the library leaves as they are."""
    rows = torch.arange(tokens, device=query_start.device)
    return (rows >= query_start[-1]).view(-1, 1, 1)


def load_with_kvcache() -> WithKVCache:
    """Import the library's entry point.

    Raises:
        StartupError: the package cannot be loaded here.
    """
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except (ImportError, OSError, RuntimeError) as problem:
        raise StartupError(
            f"attention backend {BACKEND.name} cannot load the package flash-attn-3: {problem}; "
            f"{BACKEND.install} builds it, and --attention-backend paged_attention needs no library"
        ) from problem
    entry: WithKVCache = flash_attn_with_kvcache
    return entry
