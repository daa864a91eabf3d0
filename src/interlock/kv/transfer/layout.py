"""How a server's key-value cache is laid out, and whether two servers' caches hold the same thing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from interlock.kv.transfer.base import TransferError
from interlock.parallel.sharding import kv_heads_of
from interlock.plan.launch_plan import LaunchPlan

KINDS = ("k", "v")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "fp8_e4m3": 1}


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """One attention layer of the whole model. ``window`` is None for full attention; widths in channels."""

    layer: int
    window: int | None
    kv_heads: int
    k_width: int
    v_width: int

    def width(self, kind: str) -> int:
        return self.k_width if kind == "k" else self.v_width


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one attention replica: what every rank holds of every layer.

    Attributes:
        model: sha256 of the checkpoint's config, as its card has it.
        attn_tp: attention-TP ranks that share the heads.
        full_pages, window_pages: pages of each space, 0 where the model has no such layers.
        window: keys that the widest sliding window sees, the token itself included.
    """

    model: str
    dtype: str
    page_size: int
    attn_tp: int
    full_pages: int
    window_pages: int
    window: int | None
    layers: tuple[LayerLayout, ...]

    @staticmethod
    def of(plan: LaunchPlan) -> CacheLayout:
        extra = plan.sliding_window_extra
        layers = tuple(
            LayerLayout(
                index,
                None if layer.attention.window is None else layer.attention.window + extra,
                layer.attention.num_kv_heads,
                layer.attention.head_dim,
                layer.attention.v_head_dim,
            )
            for index, layer in enumerate(plan.card.layers)
        )
        return CacheLayout(
            model=plan.card.config_hash,
            dtype=plan.kv_cache_dtype,
            page_size=plan.page_size,
            attn_tp=plan.attn_tp_size,
            full_pages=plan.full_pages,
            window_pages=plan.window_pages,
            window=max((layer.window for layer in layers if layer.window is not None), default=None),
            layers=layers,
        )

    @property
    def buffers(self) -> list[tuple[LayerLayout, str]]:
        """Layer and kind of each buffer of a rank, in the order in which a rank registers them."""
        return [(layer, kind) for layer in self.layers for kind in KINDS]

    def row_bytes(self, layer: LayerLayout, kind: str) -> int:
        """Bytes of one token in one rank's buffer."""
        heads = len(kv_heads_of(layer.kv_heads, self.attn_tp, 0))
        return heads * layer.width(kind) * ELEMENT_BYTES[self.dtype]

    def pages(self, layer: LayerLayout) -> int:
        return self.full_pages if layer.window is None else self.window_pages

    def sizes(self) -> list[int]:
        """Bytes of each buffer of a rank."""
        return [
            self.pages(layer) * self.page_size * self.row_bytes(layer, kind) for layer, kind in self.buffers
        ]

    def check(self) -> None:
        """Raises ``TransferError`` for a layout that cannot be anybody's (it came over a network)."""
        if self.dtype not in ELEMENT_BYTES:
            raise TransferError(f"kv_cache_dtype: {self.dtype!r} is unknown here")
        if self.page_size < 1 or self.attn_tp < 1:
            raise TransferError(f"page_size {self.page_size} and attn_tp {self.attn_tp} must be 1 or more")
        if len({layer.layer for layer in self.layers}) != len(self.layers):
            raise TransferError("a layer is named twice")
        for layer in self.layers:
            if min(layer.kv_heads, layer.k_width, layer.v_width, self.pages(layer)) < 1:
                raise TransferError(f"layer {layer.layer} holds nothing")
            if layer.kv_heads % self.attn_tp and self.attn_tp % layer.kv_heads:
                raise TransferError(
                    f"tp_size: {layer.kv_heads} key-value heads of layer {layer.layer} do not map to "
                    f"{self.attn_tp} attention-TP ranks"
                )


def refuse_different(prefill: CacheLayout, decode: CacheLayout) -> None:
    """Compare what must be equal. Numbers of pages and attention-TP ranks may differ, and page sizes where
    there is no sliding window or the prefill server's is a multiple: of a window's tail it keeps whole pages
    of its own only, and the decode server needs whole pages of its own.

    Raises:
        TransferError: the first difference, with both values.
    """
    for name, mine, theirs in _differences(prefill, decode):
        raise TransferError(
            f"{name}: the prefill server has {mine} and the decode server {theirs}; "
            "start both with the same checkpoint and the same value"
        )


def _differences(prefill: CacheLayout, decode: CacheLayout) -> Iterator[tuple[str, object, object]]:
    if prefill.model != decode.model:
        yield "MODEL", f"config {prefill.model[:12]}", f"config {decode.model[:12]}"
    if prefill.dtype != decode.dtype:
        yield "--kv-cache-dtype", prefill.dtype, decode.dtype
    if prefill.window is not None and prefill.page_size % decode.page_size:
        yield "--page-size (sliding-window layers)", prefill.page_size, decode.page_size
    theirs = {layer.layer: layer for layer in decode.layers}
    mine = {layer.layer: layer for layer in prefill.layers}
    if mine.keys() != theirs.keys():
        yield "--num-hidden-layers", sorted(mine), sorted(theirs)
        return
    for index, layer in mine.items():
        for name in ("window", "kv_heads", "k_width", "v_width"):
            values = getattr(layer, name), getattr(theirs[index], name)
            if values[0] != values[1]:
                yield f"{name} of layer {index}", *values
