"""Attention over a paged cache: qkv -> (q/k norm) -> rope and store -> attention -> output projection.

Legend: n tokens, nh and kvh query and key-value heads of this rank, hd query/key and vd value head size.
"""

from __future__ import annotations

import torch

from interlock.checkpoint.qkv import part_rows
from interlock.checkpoint.source import WeightSource
from interlock.kernels.base import QuantisedRows
from interlock.kv.cache import LayerCache
from interlock.nn.context import ModelContext
from interlock.nn.linear import ColumnParallelLinear, HeldFormats, RowParallelLinear, WeightRows
from interlock.nn.norm import RMSNorm
from interlock.nn.rope import RopeTables
from interlock.parallel.sharding import shard_heads
from interlock.plan.card import AttentionCard
from interlock.plan.qkv_blocks import PARTS, PartBlocks, Stored, part_blocks
from interlock.step import PageMap, Step


class Attention:
    """One layer's attention, heads cut over the attention-TP group.

    Args:
        chunks: row chunks of a fused qkv tensor in the chunked layout (see ``checkpoint/qkv.py``).

    Attributes:
        calls: of the attention backend; captured ones count once.
    """

    def __init__(
        self, card: AttentionCard, context: ModelContext, *, tables: RopeTables, eps: float, chunks: int
    ) -> None:
        group = context.groups.attn_tp
        self._card, self._context, self._chunks = card, context, chunks
        self._heads = shard_heads(card, group.size, group.rank)
        self._window = None if card.window is None else card.window + context.plan.sliding_window_extra
        self._max_keys = context.plan.sequence_pages * context.plan.page_size
        self._cos_sin = tables.get(card.rope_theta, card.rotary_dim)
        held = context.plan.attention_weight_format
        self._qkv = ColumnParallelLinear(context, held)
        self._columns: list[PartBlocks] = []
        self._o = RowParallelLinear(
            context,
            held,
            in_features=card.num_heads * card.v_head_dim,
            out_features=context.plan.card.hidden_size,
        )
        self._q_norm = RMSNorm(context, eps) if card.has_qk_norm else None
        self._k_norm = RMSNorm(context, eps) if card.has_qk_norm else None
        self.sinks: torch.Tensor | None = None
        self.calls = 0

    @property
    def window_extra(self) -> int | None:
        """Keys that are seen beyond the card's window; None for full attention."""
        if self._window is None or self._card.window is None:
            return None
        return self._window - self._card.window

    @property
    def is_deterministic(self) -> bool:
        return self._o.is_deterministic

    @property
    def takes_quantised(self) -> bool:
        """Whether a call takes rows that are quantised already."""
        return self._qkv.takes_quantised

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
        """Rows of this rank's q, k and v heads, from three tensors or a fused one.

        Where fp8 blocks are kept, they are the blocks that hold these rows; ``_columns`` says where the heads
        lie in what the projection gives.
        """
        layout = source.report.qkv_layout
        chunks = {"split": 0, "plain": 1}.get(layout, self._chunks)
        names = {part: f"{prefix}{part if layout == 'split' else 'qkv'}_proj.weight" for part in PARTS}
        if self._qkv.keeps_blocks(source, names.values()):
            self._columns = [self._blocks(part, chunks) for part in PARTS]
            return [
                WeightRows(names[part], (run,), blocks.size)
                for part, blocks in zip(PARTS, self._columns, strict=True)
                for run in blocks.rows
            ]
        self._columns = [PartBlocks.dense(*self._heads_of(part)) for part in PARTS]
        rows = {
            part: part_rows(self._card, chunks=chunks, part=part, heads=self._heads_of(part)[0])
            for part in PARTS
        }
        return [WeightRows(names[part], tuple(rows[part]), sum(map(len, rows[part]))) for part in PARTS]

    def _heads_of(self, part: str) -> tuple[range, int]:
        """This rank's heads of "q", "k" or "v", and their width."""
        card = self._card
        heads = self._heads.q if part == "q" else self._heads.kv
        return heads, card.v_head_dim if part == "v" else card.head_dim

    def _blocks(self, part: str, chunks: int) -> PartBlocks:
        blocks = part_blocks(Stored(self._card, chunks), part, self._heads_of(part)[0])
        assert blocks is not None, "the planner keeps blocks only where every part has a cover"
        return blocks

    def __call__(self, x: torch.Tensor | QuantisedRows, step: Step, cache: LayerCache) -> torch.Tensor:
        """x [n, h], normalised -> [n, h]; writes this step's keys and values to ``cache``."""
        q, k, v = self._split(self._qkv(x))
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        pages = self._pages(step)
        q = self._context.kernels.rope_and_store(
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
        self.calls += 1
        out = self._context.attention.run(
            q,
            k_cache=cache.k,
            v_cache=cache.v,
            page_table=pages.table,
            query_start=step.query_start,
            kv_len=step.kv_len,
            scale=self._card.head_dim**-0.5,
            window=self._window,
            sinks=self.sinks,
            max_keys=self._max_keys,
        )
        return self._o(out.flatten(1))

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views [n, nh, hd], [n, kvh, hd], [n, kvh, vd] of one projection."""
        views, start = [], 0
        for part in self._columns:
            views.append(heads_of(qkv[:, start : start + part.columns], part))
            start += part.columns
        q, k, v = views
        return q, k, v

    def _pages(self, step: Step) -> PageMap:
        pages = step.full if self._window is None else step.window
        assert pages is not None, "the step has no page map for this layer's page space"
        return pages


def heads_of(columns: torch.Tensor, part: PartBlocks) -> torch.Tensor:
    """The heads that lie in the columns [n, part.columns] of one part: a view [n, heads, width]."""
    n = len(columns)
    if part.is_dense:
        return columns.view(n, columns.shape[1] // part.width, part.width)
    end = part.offset + part.heads * part.width
    if len(part.rows) == 1:
        return columns[:, part.offset : end].view(n, part.heads, part.width)
    return columns.view(n, len(part.rows), part.size)[:, :, part.offset : end]
