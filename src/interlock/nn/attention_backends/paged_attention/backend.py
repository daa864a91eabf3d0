"""Hands every call to the kernel set."""

from __future__ import annotations

import torch

from interlock.nn.attention_backends.base import AttentionReceipt, AttentionSpec
from interlock.nn.attention_backends.paged_attention import BACKEND


class KernelAttention:
    """See ``PagedAttention``."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._kernels = spec.kernels
        self._calls = 0
        self._rows = 0

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
        """See ``PagedAttention.run``."""
        self._calls += 1
        self._rows += q.shape[0]
        return self._kernels.paged_attention(
            q,
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=page_table,
            query_start=query_start,
            kv_len=kv_len,
            scale=scale,
            window=window,
            sinks=sinks,
            max_keys=max_keys,
        )

    def observed(self) -> AttentionReceipt:
        """What was called, and how often."""
        entry = type(self._kernels).paged_attention
        return AttentionReceipt(
            name=BACKEND.name,
            entry=f"{entry.__module__}.{entry.__qualname__}",
            calls=self._calls,
            rows=self._rows,
        )
