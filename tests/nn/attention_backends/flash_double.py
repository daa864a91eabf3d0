"""``flash_attn_interface`` of FlashAttention-3 in torch: computes attention and enforces the library's rules.

Every assertion stands for one of the library's own (``hopper/flash_attn_interface.py``, ``mha_fwd`` of
``hopper/flash_api.cpp``, version 3.0.0), in float32 from what is cached. What the library reads without need
is read here too: all pages of a sequence, and values behind the window, which a factor of 0 does not make
harmless where they are NaN. What it leaves as it was is NaN: rows of no sequence, and their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

MAX_WIDTH = 256


class FlashAttention3:
    """The module's function, and the arguments of every call.

    ``dtypes``: of queries; the library has float16 and bfloat16 (and fp8, which is not modelled).
    """

    def __init__(self, dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16)) -> None:
        self.dtypes = tuple(dtypes)
        self.calls: list[dict[str, Any]] = []

    def module(self) -> ModuleType:
        """Stands in for ``flash_attn_interface``."""
        fake = ModuleType("flash_attn_interface")

        def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
            return self.with_kvcache(*args, **kwargs)

        flash_attn_with_kvcache.__module__ = fake.__name__
        flash_attn_with_kvcache.__qualname__ = "flash_attn_with_kvcache"
        fake.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache
        return fake

    def with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        unused = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, cu_seqlens_k_new)
        unused += (rotary_seqlens, q_descale, k_descale, v_descale, scheduler_metadata)
        assert all(each is None for each in unused), "not modelled here"
        assert (attention_chunk, softcap) == (0, 0.0), "not modelled here"
        assert isinstance(cache_seqlens, torch.Tensor)
        assert page_table is not None
        assert cu_seqlens_q is not None
        assert isinstance(max_seqlen_q, int), "max_seqlen_q must be provided if cu_seqlens_q is provided"
        self._check(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q)
        assert 0 <= num_splits <= 256
        self.calls.append(
            {
                "window_size": window_size,
                "causal": causal,
                "max_seqlen_q": max_seqlen_q,
                "num_splits": num_splits,
            }
        )
        tokens, heads, width = q.shape
        scale = width**-0.5 if softmax_scale is None else softmax_scale
        out = torch.full((tokens, heads, v_cache.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
        lse = torch.full((heads, tokens), math.nan, dtype=torch.float32, device=q.device)
        starts = cu_seqlens_q.tolist()
        assert starts[0] == 0
        for sequence, keys in enumerate(cache_seqlens.tolist()):
            rows = slice(starts[sequence], starts[sequence + 1])
            count = rows.stop - rows.start
            assert 0 <= count <= max_seqlen_q
            assert 0 <= keys <= page_table.shape[1] * k_cache.shape[1]
            if count:
                values, sums = _attend(
                    q[rows],
                    *(_read(cache, page_table[sequence], keys) for cache in (k_cache, v_cache)),
                    scale,
                    causal,
                    window_size,
                )
                out[rows], lse[:, rows] = values.to(q.dtype), sums
        return (out, lse, torch.empty(0), torch.empty(0)) if return_softmax_lse else out

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> None:
        assert q.dtype in self.dtypes, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type"
        assert k_cache.dtype == q.dtype, "query and key must have the same dtype"
        assert v_cache.dtype == q.dtype, "query and value must have the same dtype"
        given = (q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q)
        assert {each.device for each in given} == {q.device}
        for each in (q, k_cache, v_cache, page_table):
            assert each.stride(-1) == 1, "must have contiguous last dimension"
        for each in (cache_seqlens, page_table, cu_seqlens_q):
            assert each.dtype == torch.int32, "must have dtype torch.int32"
        assert cache_seqlens.is_contiguous()
        assert cu_seqlens_q.is_contiguous()
        tokens, heads, qk = q.shape
        pages, page_size, kv_heads, vd = v_cache.shape
        batch = cu_seqlens_q.shape[0] - 1
        assert tokens > 0
        assert k_cache.shape == (pages, page_size, kv_heads, qk)
        assert cache_seqlens.shape == (batch,)
        assert page_table.shape[0] == batch, "batch_size must be equal to batch_size_k"
        assert qk <= MAX_WIDTH
        assert qk % 8 == vd % 8 == 0, "head_size should be a multiple of 8"
        assert qk == vd or (128 < qk <= 192 and 96 < vd <= 128) or (qk <= 64 and vd <= 512)
        assert heads % kv_heads == 0


def _read(cache: torch.Tensor, pages: torch.Tensor, keys: int) -> torch.Tensor:
    """[keys, kvh, width] float32 of one sequence; every page of it is read."""
    page_size = cache.shape[1]
    held = pages[: -(-keys // page_size)].tolist()
    assert all(0 <= page < cache.shape[0] for page in held), f"reads outside the cache: {held}"
    return cache[held].flatten(0, 1)[:keys].float()


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n, nh, vd] and log-sum-exp [nh, n], float32, of the last n positions of the keys."""
    (n, heads, _), (keys, kv_heads, _) = q.shape, k.shape
    k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
    left, right = window_size
    right = 0 if causal else right
    at = torch.arange(n)[:, None] + keys - n
    key = torch.arange(keys)[None, :]
    visible = torch.ones(n, keys, dtype=torch.bool)
    if left >= 0:
        visible &= key >= at - left
    if right >= 0:
        visible &= key <= at + right
    scores = torch.einsum("nhd,khd->hnk", q.float(), k) * scale
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return torch.einsum("hnk,khd->nhd", weights, v), lse
