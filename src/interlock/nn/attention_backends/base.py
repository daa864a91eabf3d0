"""What an attention backend declares, and what it does. No torch at import time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from interlock.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class HeadWidths:
    """Widths of query/key heads and of value heads that go together: lowest and highest, both included.

    Attributes:
        same: both widths must be equal.
        multiple: what each must be a multiple of.
    """

    qk: tuple[int, int]
    v: tuple[int, int]
    same: bool = False
    multiple: int = 1

    def hold(self, qk: int, v: int) -> bool:
        """Whether heads of these widths can be computed."""
        inside = self.qk[0] <= qk <= self.qk[1] and self.v[0] <= v <= self.v[1]
        return inside and (qk == v or not self.same) and qk % self.multiple == v % self.multiple == 0

    def __str__(self) -> str:
        low, high = self.qk
        if self.same:
            return f"{low} to {high} of keys and values alike"
        return f"{low} to {high} of keys with {self.v[0]} to {self.v[1]} of values"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackend:
    """Capabilities of one backend, matched by the planner with the model and the machine.

    Attributes:
        devices: "cpu", "cuda".
        backend: "module:Class", constructed with an ``AttentionSpec``.
        dtypes: of queries and results: "float32", "bfloat16".
        kv_dtypes: of cached keys and values; empty for what the kernel set caches.
        head_widths: of the heads that it computes, any one of these; empty for any.
        page_multiple: what the page size must be a multiple of.
        windows: computes sliding windows.
        sinks: computes sinks, by itself or in what follows it.
        min_capability, max_capability: compute capabilities of NVIDIA GPUs, both included.
        capturable: a decode step with it can be captured as a CUDA graph.
        row_invariant: with row-invariant kernels, a row's bits do not depend on the rows beside it.
        packages: distributions that must be installed (PEP 508).
        install: how they are installed, where that is not ``pip install NAME``.
        never_run: what it still has to be run on before anything is claimed; "" once it was.
        portable: the one that ``auto`` takes: computes on every device and every model.
    """

    name: str
    summary: str
    devices: frozenset[str]
    backend: str
    dtypes: frozenset[str]
    kv_dtypes: frozenset[str] = frozenset()
    head_widths: tuple[HeadWidths, ...] = ()
    page_multiple: int = 1
    windows: bool = True
    sinks: bool = True
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    capturable: bool = False
    row_invariant: bool = False
    packages: tuple[str, ...] = ()
    install: str = ""
    never_run: str = ""
    portable: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a rank's backend is built from."""

    kernels: Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReceipt:
    """What a live backend observed of itself.

    Attributes:
        entry: the function that computes, by its full name.
        calls: how often it was called, captured calls once.
        rows: query rows of these calls.
    """

    name: str
    entry: str
    calls: int
    rows: int
    extra: Mapping[str, object] = field(default_factory=dict)


class PagedAttention(Protocol):
    """A rank's live backend, shared by all its layers."""

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
        """See ``Kernels.paged_attention``, whose meaning this has in every argument.

        The tensors of a step (``page_table``, ``query_start``, ``kv_len``) are the same objects in all layers
        that share them and do not change while it runs.
        """
        ...

    def observed(self) -> AttentionReceipt:
        """What it called, and how often."""
        ...
