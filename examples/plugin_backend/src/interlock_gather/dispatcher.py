"""The dispatcher of backend ``gather``: two methods; ``CheckedDispatcher`` checks the contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from interlock.moe.a2a.checked import CheckedDispatcher
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput
from interlock.moe.layouts import aligned_segments, count_lanes, positions
from interlock.moe.terms import Phase
from interlock_gather import BACKEND


@dataclass(frozen=True)
class WayBack:
    """lanes: flat lane (of all tokens) of each local row; at: that row; first: where our tokens start."""

    lanes: torch.Tensor
    at: torch.Tensor
    all_lanes: int
    first: int
    ids: torch.Tensor


class Gather(CheckedDispatcher):
    """Gathers over the expert-parallel group; T is the padding, so that shapes agree without asking."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, BACKEND)

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        group, spec = self.spec.groups.ep, self.spec
        missing = (0, 0, 0, spec.capacity[phase] - hidden.shape[0])
        tokens = group.all_gather(pad(hidden, missing))
        lanes = group.all_gather(pad(ids, missing, value=-1)).flatten()
        lane_weights = group.all_gather(pad(weights, missing)).flatten()

        held = spec.local_experts
        mine = ((lanes >= held.start) & (lanes < held.stop)).nonzero().squeeze(1)
        experts = lanes[mine] - held.start
        segments = aligned_segments(count_lanes(experts, len(held)), spec.alignment)
        at = positions(experts, segments)
        rows = tokens.new_empty(segments.rows, spec.hidden_size)
        rows[at] = tokens[mine // spec.top_k]
        row_weights = weights.new_zeros(segments.rows)
        row_weights[at] = lane_weights[mine]
        received = ContiguousRows(
            rows=rows,
            psum=segments.psum.int(),
            counts=segments.counts.int(),
            alignment=spec.alignment,
            weights=row_weights,
        )
        first = group.rank * spec.capacity[phase]
        return received, WayBack(lanes=mine, at=at, all_lanes=lanes.numel(), first=first, ids=ids)

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        way: WayBack = state
        spec = self.spec
        results = rows.new_zeros(way.all_lanes, spec.hidden_size)
        results[way.lanes] = rows[way.at]
        # Each lane has one non-zero summand, so this is exact and the order of lanes is still ours to keep.
        results = spec.groups.ep.all_reduce(results).view(-1, spec.top_k, spec.hidden_size)
        own = results[way.first : way.first + num_tokens]
        return spec.kernels.sum_lanes(own, way.ids, spec.dtype)
