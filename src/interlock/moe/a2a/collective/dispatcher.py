"""Dispatch and combine with ``all_to_all_single``: three exchanges to send tokens, one to bring them back.

On the wire a token goes once to each rank that holds one of its experts, with a record for each of its lanes
there; the receiver copies it to every expert that wants it. Results come back one for each lane, because only
the token's home can add them in their one order, whatever the number of ranks.

Everything travels as bytes: gloo knows no float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from interlock.moe.a2a.checked import CheckedDispatcher
from interlock.moe.a2a.collective import BACKEND
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows
from interlock.moe.a2a.torch_groups import process_group
from interlock.moe.layouts import aligned_segments, count_lanes, positions, slab_segments
from interlock.moe.terms import Layout, Phase


@dataclass(frozen=True, slots=True)
class _WayBack:
    """What combine needs: where each received lane's result lies, and where each sent lane belongs.

    received_at int64 [P received], sent_lanes int64 [P sent] (token * k + lane), ids [n, k].
    """

    received_at: torch.Tensor
    sent_lanes: torch.Tensor
    lanes_in: list[int]
    lanes_out: list[int]
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """What this rank sends, ordered by (destination, token, lane).

    tokens int64 [m], the rows to send; lanes int64 [P]; records int32 [P, 3]: row within the
    destination's block, local expert there, bits of the weight. rows_out, lanes_out: counts for each rank.
    """

    tokens: torch.Tensor
    lanes: torch.Tensor
    records: torch.Tensor
    rows_out: torch.Tensor
    lanes_out: torch.Tensor


class Collective(CheckedDispatcher):
    """Backend ``collective``, over ``groups.ep``."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, BACKEND)
        self._ranks = len(spec.experts)
        owner = torch.empty(spec.num_experts, dtype=torch.int64)
        local = torch.empty(spec.num_experts, dtype=torch.int64)
        for rank, held in enumerate(spec.experts):
            owner[held.start : held.stop] = rank
            local[held.start : held.stop] = torch.arange(len(held))
        self._owner, self._local_id = owner.to(spec.device), local.to(spec.device)

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        out = self._outgoing(ids, weights)
        counts_out = torch.stack([out.rows_out, out.lanes_out], dim=1)
        counts_in = self._all_to_all(counts_out)
        (rows_out, lanes_out), (rows_in, lanes_in) = counts_out.T.tolist(), counts_in.T.tolist()
        records = self._all_to_all(out.records, lanes_out, lanes_in)
        rows = self._all_to_all(_bytes(hidden)[out.tokens], rows_out, rows_in)
        if scales is not None:
            scales = self._all_to_all(scales[out.tokens], rows_out, rows_in)

        block_starts = counts_in[:, 0].cumsum(0) - counts_in[:, 0]
        source = records[:, 0] + block_starts.repeat_interleave(counts_in[:, 1])
        experts = records[:, 1].to(torch.int64)
        lane_weights = records[:, 2].contiguous().view(torch.float32)
        received = rows.view(hidden.dtype)
        laid_out, received_at = self._lay_out(phase, received, scales, source, experts, lane_weights)
        way_back = _WayBack(received_at, out.lanes, lanes_in, lanes_out, ids)
        return laid_out, way_back

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        way: _WayBack = state
        spec = self.spec
        results = rows.reshape(-1, spec.hidden_size)[way.received_at]
        returned = self._all_to_all(_bytes(results), way.lanes_in, way.lanes_out).view(spec.dtype)
        lanes = returned.new_zeros(num_tokens * spec.top_k, spec.hidden_size)
        lanes[way.sent_lanes] = returned
        return spec.kernels.sum_lanes(
            lanes.view(num_tokens, spec.top_k, spec.hidden_size), way.ids, spec.dtype
        )

    def _outgoing(self, ids: torch.Tensor, weights: torch.Tensor) -> _Outgoing:
        lanes = ids.flatten()
        used = (lanes >= 0).nonzero().squeeze(1)
        owner = self._owner[lanes[used]]
        order = owner.argsort(stable=True)
        lanes_sent, owner = used[order], owner[order]
        tokens = lanes_sent // self.spec.top_k
        # A token's lanes for one rank are neighbours now, so its row is sent where (rank, token) changes.
        first = torch.ones_like(owner, dtype=torch.bool)
        first[1:] = (owner[1:] != owner[:-1]) | (tokens[1:] != tokens[:-1])
        rows_out = count_lanes(owner[first], self._ranks)
        lanes_out = count_lanes(owner, self._ranks)
        block_starts = rows_out.cumsum(0) - rows_out
        row_in_block = first.cumsum(0) - 1 - block_starts[owner]
        records = torch.stack(
            [
                row_in_block.to(torch.int32),
                self._local_id[lanes[lanes_sent]].to(torch.int32),
                weights.flatten()[lanes_sent].view(torch.int32),
            ],
            dim=1,
        )
        return _Outgoing(tokens[first], lanes_sent, records, rows_out, lanes_out)

    def _lay_out(
        self,
        phase: Phase,
        received: torch.Tensor,
        scales: torch.Tensor | None,
        source: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[ExpertInput, torch.Tensor]:
        spec = self.spec
        num_local = len(spec.local_experts)
        counts = count_lanes(experts, num_local)
        masked = spec.layouts[phase] is Layout.MASKED
        slab_rows = self._ranks * spec.capacity[phase]
        segments = slab_segments(counts, slab_rows) if masked else aligned_segments(counts, spec.alignment)
        at = positions(experts, segments)
        rows = _bytes(received.new_empty(segments.rows, spec.hidden_size))
        rows[at] = _bytes(received)[source]
        rows = rows.view(received.dtype)
        row_weights = weights.new_zeros(segments.rows)
        row_weights[at] = weights
        row_scales = None
        if scales is not None:
            row_scales = scales.new_ones(segments.rows, scales.shape[1])
            row_scales[at] = scales[source]
        true_counts = counts.to(torch.int32)
        if masked:
            slab = (num_local, slab_rows)
            return (
                MaskedRows(
                    rows=rows.view(*slab, -1),
                    counts=true_counts,
                    weights=row_weights.view(slab),
                    scales=None if row_scales is None else row_scales.view(*slab, -1),
                ),
                at,
            )
        return (
            ContiguousRows(
                rows=rows,
                psum=segments.psum.to(torch.int32),
                counts=true_counts,
                alignment=spec.alignment,
                weights=row_weights,
                scales=row_scales,
            ),
            at,
        )

    def _all_to_all(
        self,
        tensor: torch.Tensor,
        sizes_out: list[int] | None = None,
        sizes_in: list[int] | None = None,
    ) -> torch.Tensor:
        """Rows of dimension 0 to all ranks: equal parts, or ``sizes_out`` rows to each."""
        if self._ranks == 1:
            return tensor
        group = process_group(self.spec.groups.ep)
        total = tensor.shape[0] if sizes_in is None else sum(sizes_in)
        received = tensor.new_empty(total, *tensor.shape[1:])
        dist.all_to_all_single(received, tensor.contiguous(), sizes_in, sizes_out, group=group)
        return received


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
