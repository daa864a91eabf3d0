"""The compute kernels that the layers call, as one interface with one implementation a device.

Every implementation computes what ``kernels/torch_reference.py`` computes. Promises of every
implementation that declares ``row_invariant``: the bits of one output row depend on that row's inputs
and on the weights only (not on the number of rows, on the row's place, on the number of threads, on how a
prompt was cut into chunks, or on which slice of the output columns this rank holds).

Legend: n rows, s sequences, K input width, N output width, nh query heads, kvh key-value heads,
hd query/key head size, vd value head size, E local experts, i expert width, h hidden size, R expert rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear weight [N, K] in the layout an implementation likes; ``data`` is its own business."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    data: Any
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """E experts: gate_up [E, 2i, h] (gate rows first) and down [E, h, i], packed."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    data: Any
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Which row of the input each expert computes, and where its result goes.

    Attributes:
        offsets: int64 [E + 1]; rows of local expert e are ``offsets[e] : offsets[e + 1]`` of the lists below.
        source: int64 [R], row of the input.
        target: int64 [R], row of the output, all distinct.
        weight: float32 [R], factor applied to the result in the epilogue (1 where none is wanted).
    """

    offsets: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows x [n, K] as a block-fp8 linear reads them; a value times its scale is what it stands for.

    Attributes:
        values: e4m3 [n, K].
        scales: float32 [K / 128, n], one for each row and 128 channels.
        dtype: of the rows that were quantised, so the usual dtype of a result.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What compiling ahead took.

    Attributes:
        rehearsed_seconds: finding out what will be launched; compilation goes on meanwhile.
        waited_seconds: from then until all was compiled and loaded.
        cpu_seconds: of all processes that compiled.
        slowest: names of kernels and the seconds from the start of their compilation to its end.
    """

    kernels: int
    rehearsed_seconds: float
    waited_seconds: float
    cpu_seconds: float
    slowest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class CompileShare:
    """One rank's part in compiling. The ranks of a machine need the same kernels and share a cache on disk:
    each compiles its own part first, and finds most of the others' when it comes to them.

    Attributes:
        processes: kernels that it compiles at a time.
        rank, ranks: its number among those of its machine.
    """

    processes: int
    rank: int = 0
    ranks: int = 1


class Compiler(Protocol):
    """Compiles kernels before they are launched; made long before its use, since it needs time to start."""

    def compile_ahead(self, rehearse: Callable[[], None]) -> CompileReport:
        """Compile whatever ``rehearse`` would launch, in parallel. What it computes meanwhile means nothing.

        Raises:
            StartupError: something does not compile.
        """

    def close(self) -> None:
        """End its processes; idempotent."""


class Kernels(Protocol):
    """Compute kernels of one device. Row strides of inputs may be larger than the row; last dim is dense."""

    name: str
    row_invariant: bool

    def compiler(self, share: CompileShare) -> Compiler | None:
        """Start what compiles this rank's kernels; None for a set that is compiled already."""

    def pack_linear(self, weight: torch.Tensor) -> PackedWeight:
        """Pack [N, K] float32 or bfloat16; may free nothing of its input."""

    def pack_linear_fp8(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> PackedWeight:
        """Pack e4m3 [N, K] with float32 scales [ceil(N / 128), K / 128] of its blocks, or quantise a float
        weight to that. ``linear`` then quantises x row by row in groups of 128 (see ``fp8_blocks``).

        Raises TypeError where a kernel set computes no fp8 (``plan/kernel_choice.py`` says which do).
        """

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """x [n, K] times the transposed weight -> [n, N]; float32 accumulation, rounded once to
        ``out_dtype`` (default: x's dtype). x and weight may differ in dtype (float32 or bfloat16 each)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., h] * rsqrt(mean(x^2) + eps) computed in float32, rounded to x's dtype, times weight [h]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual' = x + residual (in their dtype); returns (rms_norm(residual'), residual')."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [n, 2i] -> silu(gate) * up, [n, i]; float32 inside, rounded once."""

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        value_scale: float,
    ) -> torch.Tensor:
        """Rotate q and k (half-split style, first r channels), scale v, write k and v to the cache.

        q [n, nh, hd], k [n, kvh, hd], v [n, kvh, vd]; positions int64 [n]; cos_sin float32 [max_pos, r]
        (cos of the r/2 frequencies, then sin); k_cache [pages, page_size, kvh, hd], v_cache
        [pages, page_size, kvh, vd]; slots int64 [n], -1 writes nothing. Returns the rotated q, [n, nh, hd],
        which may be q itself, rotated in place.
        """

    def paged_attention(
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
        """Causal attention of q [n, nh, hd] over paged keys and values -> [n, nh, vd].

        Token t of sequence i has position ``kv_len[i] - (query_start[i+1] - query_start[i]) + t`` and sees
        keys at positions <= its own, and > its own - window when ``window`` is given (so ``window`` keys
        including itself). q head j reads kv head j // (nh / kvh). ``sinks`` float32 [nh] is one more logit
        a head, unscaled, without a value. page_table int32 [s, P] by absolute page index; entries behind the
        window may be -1 and are never read. Softmax in float32. Rows at or beyond query_start[-1] (padding)
        give zeros.

        ``max_keys`` is what a sequence of any step may have at most, None for what the table holds. Kernels
        that cut a sequence's keys into parts do so by it, and not by the table's width: that is the longest
        sequence of an eager step and the longest there may be of a captured one.
        """

    def pack_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        """Pack gate_up [E, 2i, h] and down [E, h, i]."""

    def expert_mlp(
        self, x: torch.Tensor, experts: PackedExperts, rows: ExpertRows, out: torch.Tensor
    ) -> None:
        """out[target] = weight * down_e(silu(gate_e x[source]) * up_e x[source]) for every listed row.

        x [*, h]; out [*, h] float32 or x's dtype; rows of ``out`` that no target names stay untouched.
        Accumulates in float32; the intermediate activation is rounded to x's dtype.
        """

    def draw(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """One token of each row of float32 logits [r, V] -> int64 [r].

        Weights are exp((logit - largest) / temperature). Those below ``min_p``, then those whose logit is
        below the ``top_k``-th largest (0: all stay), then those outside the smallest set of largest ones that
        holds ``top_p`` of what is left are dropped; what ties with the last one kept stays. The token is the
        first whose cumulative weight, in order of id and in float64, exceeds ``uniforms`` times the total.
        temperature float32, top_k int64, top_p, min_p and uniforms float64, each [r]. A row with NaN or
        infinity gives any id.
        """

    def sum_lanes(self, rows: torch.Tensor, ids: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """rows [n, k, h], ids int64 [n, k] -> [n, h]: sum over lanes in ascending lane order in float32,
        lanes with id -1 skipped (their rows may hold anything), rounded once to ``out_dtype``."""


@runtime_checkable
class QuantisingKernels(Protocol):
    """Kernels that quantise what a block-fp8 linear is to read where it is made. The bits are those of the
    separate steps: each result is rounded to its dtype before it is quantised. Channels in 128s."""

    def add_rms_norm_quantised(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[QuantisedRows, torch.Tensor]:
        """``add_rms_norm`` of x [n, h], or ``rms_norm`` without a residual (which x then becomes)."""

    def silu_and_mul_quantised(self, gate_up: torch.Tensor) -> QuantisedRows:
        """``silu_and_mul`` of gate_up [n, 2i]."""

    def linear_quantised(
        self, rows: QuantisedRows, weight: PackedWeight, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``linear`` with a weight of ``pack_linear_fp8``."""
