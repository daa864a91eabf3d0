"""Attention over a paged cache: qkv -> (q/k norm) -> rope and store -> attention -> output projection.

Legend: n tokens, nh and kvh query and key-value heads of this rank, hd query/key and vd value head size.
"""

from __future__ import annotations

import torch

from interlock.checkpoint.qkv import qkv_rows
from interlock.checkpoint.source import WeightSource
from interlock.engine.step import PageMap, Step
from interlock.kv.cache import LayerCache
from interlock.nn.context import ModelContext
from interlock.nn.linear import ColumnParallelLinear, HeldFormats, RowParallelLinear, WeightRows
from interlock.nn.norm import RMSNorm
from interlock.nn.rope import RopeTables
from interlock.nn.sharding import shard_heads
from interlock.plan.card import AttentionCard


class Attention:
    """One layer's attention, heads cut over the attention-TP group.

    Args:
        chunks: row chunks of a fused qkv tensor in the chunked layout (see ``checkpoint/qkv.py``).
    """

    def __init__(
        self, card: AttentionCard, context: ModelContext, *, tables: RopeTables, eps: float, chunks: int
    ) -> None:
        group = context.groups.attn_tp
        self._card, self._context, self._chunks = card, context, chunks
        self._heads = shard_heads(card, group.size, group.rank)
        self._window = None if card.window is None else card.window + context.plan.sliding_window_extra
        self._cos_sin = tables.get(card.rope_theta, card.rotary_dim)
        held = context.plan.attention_weight_format
        self._qkv = ColumnParallelLinear(context, held)
        self._o = RowParallelLinear(
            context,
            held,
            in_features=card.num_heads * card.v_head_dim,
            out_features=context.plan.card.hidden_size,
        )
        self._q_norm = RMSNorm(context, eps) if card.has_qk_norm else None
        self._k_norm = RMSNorm(context, eps) if card.has_qk_norm else None
        self.sinks: torch.Tensor | None = None

    @property
    def window_extra(self) -> int | None:
        """Keys that are seen beyond the card's window; None for full attention."""
        if self._window is None or self._card.window is None:
            return None
        return self._window - self._card.window

    @property
    def is_deterministic(self) -> bool:
        return self._o.is_deterministic

    def load(self, source: WeightSource, prefix: str) -> None:
        self._qkv.load_parts(source, self._qkv_parts(source, prefix))
        self._o.load(source, prefix + "o_proj.weight")
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.load(source, prefix + "q_norm.weight")
            self._k_norm.load(source, prefix + "k_norm.weight")
        if self._card.has_sink:
            sinks = source.read(prefix + "attention_sink_bias", rows=[self._heads.q])
            self.sinks = sinks.to(self._context.device)

    def tell_format(self, formats: HeldFormats) -> None:
        """Add what the projections are held in to ``formats``."""
        self._qkv.tell_format(formats)
        self._o.tell_format(formats)

    def _qkv_parts(self, source: WeightSource, prefix: str) -> list[WeightRows]:
        """nh * hd + kvh * hd + kvh * vd rows of this rank's heads, from three tensors or a fused one."""
        card, heads = self._card, self._heads
        if source.report.qkv_layout != "split":
            chunks = self._chunks if source.report.qkv_layout == "chunked" else 1
            rows = qkv_rows(card, chunks=chunks, q_heads=heads.q, kv_heads=heads.kv)
            return [WeightRows(prefix + "qkv_proj.weight", tuple(rows), sum(map(len, rows)))]
        parts = (
            ("q", card.head_dim, heads.q),
            ("k", card.head_dim, heads.kv),
            ("v", card.v_head_dim, heads.kv),
        )
        return [
            WeightRows(
                f"{prefix}{name}_proj.weight",
                (range(own.start * width, own.stop * width),),
                len(own) * width,
            )
            for name, width, own in parts
        ]

    def __call__(self, x: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [n, h], normalised -> [n, h]; writes this step's keys and values to ``cache``."""
        q, k, v = self._split(self._qkv(x))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        pages = self._pages(step)
        kernels = self._context.kernels
        q = kernels.rope_and_store(
            q,
            k,
            v,
            positions=step.positions,
            cos_sin=self._cos_sin,
            k_cache=cache.k,
            v_cache=cache.v,
            slots=pages.slots,
            value_scale=self._card.value_scale,
        )
        out = kernels.paged_attention(
            q,
            k_cache=cache.k,
            v_cache=cache.v,
            page_table=pages.table,
            query_start=step.query_start,
            kv_len=step.kv_len,
            scale=self._card.head_dim**-0.5,
            window=self._window,
            sinks=self.sinks,
        )
        return self._o(out.flatten(1))

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views [n, nh, hd], [n, kvh, hd], [n, kvh, vd] of one projection."""
        hd, vd = self._card.head_dim, self._card.v_head_dim
        nh, kvh = len(self._heads.q), len(self._heads.kv)
        n, k_start, v_start = len(qkv), nh * hd, (nh + kvh) * hd
        return (
            qkv[:, :k_start].view(n, nh, hd),
            qkv[:, k_start:v_start].view(n, kvh, hd),
            qkv[:, v_start:].view(n, kvh, vd),
        )

    def _pages(self, step: Step) -> PageMap:
        pages = step.full if self._window is None else step.window
        assert pages is not None, "the step has no page map for this layer's page space"
        return pages
