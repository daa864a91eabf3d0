"""From rows in any layout through DeepGEMM's two grouped products and our kernels around them.

A token is quantised once and its fp8 row copied to the places of its experts; SwiGLU and the quantisation of
its result are one kernel; routing weights go into the sum over lanes (replicated rows) or into the scales of
the second product's rows (grouped rows), so no pass is spent on them. Nothing synchronises with the host.

Rounding points: rows to e4m3, gate and up to bfloat16 (the library stores them), SwiGLU of those to e4m3, the
result of each lane to bfloat16, the sum over lanes to its dtype. Sums in between are float32.

Legend: n tokens, k lanes a token, R rows of the aligned segments, M rows of a slab, h hidden size.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from interlock.kernels.triton import placed_rows
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors
from interlock.kernels.triton.fp8_rows import quantise_to_places
from interlock.kernels.triton.placed_rows import Entries
from interlock.kernels.triton.placement import Places
from interlock.moe.a2a.rows import ContiguousRows, MaskedRows, ReplicatedRows
from interlock.moe.experts.deep_gemm import ALIGNMENT
from interlock.moe.experts.deep_gemm.library import DeepGemm, on_device

SLAB_FILL = 32
"""One row of a slab in so many is filled when routing is uniform (E / k of MiMo-V2 and DeepSeek-V3)."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The experts of one layer: the library and their weights."""

    library: DeepGemm
    experts: ExpertTensors

    def products_on_nothing(self) -> tuple[Callable[[DeepGemm], None], ...]:
        """Both products of aligned segments on no rows at all, for the compiler: no batch waits for it later.
        Each may be called by a thread of its own."""
        gate_up_scales, down_scales = _scales_of(self.experts)
        return (
            partial(_multiply_nothing, weight=self.experts.gate_up, weight_scales=gate_up_scales),
            partial(_multiply_nothing, weight=self.experts.down, weight_scales=down_scales),
        )

    def summed(self, rows: ReplicatedRows, dtype: torch.dtype) -> torch.Tensor:
        """-> [n, h]: weighted results summed over a token's lanes, ascending, in float32, rounded once."""
        results, places = self._replicated(rows)
        return placed_rows.gather(results, places.of_lane, rows.weights, dtype)

    def lanes(self, rows: ReplicatedRows) -> torch.Tensor:
        """-> [n, k, h]: the weighted result of each lane."""
        results, places = self._replicated(rows)
        return placed_rows.gather_lanes(results, places.of_lane, rows.weights)

    def _replicated(self, rows: ReplicatedRows) -> tuple[torch.Tensor, Places]:
        count = self.experts.down.shape[0]
        places = placed_rows.aligned_places(rows.ids, count, ALIGNMENT)
        if rows.scales is None:
            values, scales = quantise_to_places(rows.rows, places.of_lane, places.rows)
        else:
            values, scales = placed_rows.scatter_rows(rows.rows, rows.scales, places.of_lane, places.rows)
        return self._products(values, scales, places.psum, places.live, None), places

    def products_alone(self, rows: ReplicatedRows) -> Callable[[], torch.Tensor]:
        """A call that repeats only the two products, on rows that are quantised and placed now."""
        count, _, inter = self.experts.down.shape
        places = placed_rows.aligned_places(rows.ids, count, ALIGNMENT)
        values, scales = quantise_to_places(rows.rows, places.of_lane, places.rows)
        act = values.repeat(1, -(-inter // values.shape[1]))[:, :inter].contiguous()
        act_scales = torch.ones(inter // GROUP, places.rows, device=values.device)
        gate_up_scales, down_scales = _scales_of(self.experts)

        def products() -> torch.Tensor:
            self.library.contiguous(values, scales, self.experts.gate_up, gate_up_scales, places.psum)
            return self.library.contiguous(act, act_scales, self.experts.down, down_scales, places.psum)

        return products

    def contiguous(self, rows: ContiguousRows) -> torch.Tensor:
        """-> [R, h], weighted; rows between the segments are undefined."""
        total = rows.rows.shape[0]
        live = placed_rows.live_blocks(rows.counts, rows.psum, total, ALIGNMENT)
        values = rows.rows
        if rows.scales is None:
            scales = torch.empty(values.shape[1] // GROUP, total, dtype=torch.float32, device=values.device)
            values = placed_rows.quantise_entries(values, _aligned_entries(live, total), scales)
        else:
            scales = rows.scales.T.contiguous()
        return self._products(values, scales, rows.psum, live, rows.weights)

    def _products(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        psum: torch.Tensor,
        live: torch.Tensor,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        gate_up_scales, down_scales = _scales_of(self.experts)
        total = values.shape[0]
        gate_up = self.library.contiguous(values, scales, self.experts.gate_up, gate_up_scales, psum)
        inter = self.experts.down.shape[2]
        act_scales = torch.empty(inter // GROUP, total, dtype=torch.float32, device=values.device)
        act = placed_rows.silu_quantise(gate_up, _aligned_entries(live, total), weights, act_scales)
        del gate_up
        return self.library.contiguous(act, act_scales, self.experts.down, down_scales, psum)

    def masked(self, rows: MaskedRows) -> torch.Tensor:
        """-> [L, M, h], weighted; rows at and beyond the count are undefined.

        The library stores whole blocks of rows, also beyond the count. Where M is no multiple of a block they
        would reach into the next expert's slab, so slabs are padded then, at the price of a copy of the
        result (and of rows that arrive quantised).
        """
        gate_up_scales, down_scales = _scales_of(self.experts)
        experts, slab_rows, hidden = rows.rows.shape
        inter = self.experts.down.shape[2]
        expected = max(1, slab_rows // SLAB_FILL)
        padded = -(-slab_rows // ALIGNMENT) * ALIGNMENT
        live = rows.counts.clamp(0, slab_rows)
        scales, entries = _slab_scales(live, slab_rows, padded, hidden)
        if rows.scales is None:
            flat = placed_rows.quantise_entries(rows.rows.flatten(0, 1), entries, scales, padded)
            values = flat.view(experts, padded, hidden)
        else:
            values = _pad_slabs(rows.rows, padded)
            scales[:, :, :slab_rows].copy_(rows.scales.transpose(1, 2))
        gate_up = self.library.masked(values, scales, self.experts.gate_up, gate_up_scales, live, expected)
        act_scales, entries = _slab_scales(live, padded, padded, inter)
        weights = None if rows.weights is None else _pad_slabs(rows.weights, padded).flatten()
        act = placed_rows.silu_quantise(gate_up.flatten(0, 1), entries, weights, act_scales)
        out = self.library.masked(
            act.view(experts, padded, inter), act_scales, self.experts.down, down_scales, live, expected,
            rows.results if padded == slab_rows else None,
        )  # fmt: skip
        return out if padded == slab_rows else out[:, :slab_rows].contiguous()


def _multiply_nothing(library: DeepGemm, weight: torch.Tensor, weight_scales: torch.Tensor) -> None:
    """weight [E, N, K]: a call whose segments are all empty."""
    device = weight.device
    experts, _, depth = weight.shape
    with on_device(device):
        psum = torch.zeros(experts, dtype=torch.int32, device=device)
        rows = torch.zeros(ALIGNMENT, depth, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(depth // GROUP, ALIGNMENT, device=device)
        library.contiguous(rows, scales, weight, weight_scales, psum)


def _aligned_entries(live: torch.Tensor, rows: int) -> Entries:
    """Blocks of 128 rows, scales [groups, R]."""
    return Entries(live, ALIGNMENT, scale_entry_stride=ALIGNMENT, scale_stride=rows)


def _slab_scales(live: torch.Tensor, slab_rows: int, padded: int, width: int) -> tuple[torch.Tensor, Entries]:
    """Scales float32 [L, width / 128, padded], and slabs of ``slab_rows`` rows as entries with them."""
    groups = width // GROUP
    scales = torch.empty(len(live), groups, padded, dtype=torch.float32, device=live.device)
    return scales, Entries(live, slab_rows, scale_entry_stride=groups * padded, scale_stride=padded)


def _pad_slabs(values: torch.Tensor, padded: int) -> torch.Tensor:
    """values [L, M, ...] -> [L, padded, ...]; what is added is undefined."""
    experts, slab_rows = values.shape[:2]
    if slab_rows == padded:
        return values
    wide = values.new_empty(experts, padded, *values.shape[2:])
    wide[:, :slab_rows].copy_(values)
    return wide


def _scales_of(experts: ExpertTensors) -> tuple[torch.Tensor, torch.Tensor]:
    assert experts.gate_up_scales is not None
    assert experts.down_scales is not None
    return experts.gate_up_scales, experts.down_scales
