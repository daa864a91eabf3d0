"""No exchange: every rank sees all tokens, computes what it holds, and an all-reduce adds the results.

With attention data parallelism the tokens of all replicas are gathered first, padded to the replica that
has most. In deterministic mode each lane's result is computed by exactly one rank, so adding the zeros of
the others is exact and the lanes can be summed in their one order afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interlock.moe.a2a.checked import CheckedDispatcher
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.none import BACKEND
from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows
from interlock.moe.terms import Phase
from interlock.parallel.group import Group


@dataclass(frozen=True, slots=True)
class _Gathered:
    """ids: local ids of all tokens; all_ids: global ids; first: where this replica's tokens start."""

    ids: torch.Tensor
    all_ids: torch.Tensor
    first: int


class NoExchange(CheckedDispatcher):
    """Backend ``none``. Reduces over ``groups.world``, gathers over ``groups.attn_dp``."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, BACKEND)
        local = spec.local_experts
        self._holds_all = len(local) == spec.num_experts
        self._local_id = torch.full((spec.num_experts + 1,), -1, dtype=torch.int64)
        self._local_id[local.start : local.stop] = torch.arange(len(local))
        self._local_id = self._local_id.to(spec.device)
        alone = spec.groups.world.size == 1
        self._sums = None if spec.deterministic else spec.dtype if alone else torch.float32

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        first = 0
        replicas = self.spec.groups.attn_dp
        if replicas.size > 1:
            widest = _widest(replicas, hidden)
            first = replicas.rank * widest
            hidden = replicas.all_gather(_padded(hidden, widest, 0.0))
            ids = replicas.all_gather(_padded(ids, widest, -1))
            weights = replicas.all_gather(_padded(weights, widest, 0.0))
        local = ids if self._holds_all else self._local_id[ids]
        rows = ReplicatedRows(rows=hidden, ids=local, weights=weights, sums=self._sums)
        return rows, _Gathered(ids=local, all_ids=ids, first=first)

    def _result_dtypes(self, rows: torch.Tensor) -> tuple[torch.dtype, ...]:
        if rows.dim() == 2 and self._sums is not None:
            return (self._sums,)
        return (self.spec.dtype,)

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        gathered: _Gathered = state
        spec = self.spec
        world = spec.groups.world
        own = slice(gathered.first, gathered.first + num_tokens)
        if rows.dim() == 2:
            return rows if world.size == 1 else world.all_reduce(rows)[own].to(spec.dtype)
        if world.size == 1:
            return spec.kernels.sum_lanes(rows, gathered.ids, spec.dtype)
        if spec.deterministic:
            lanes = rows.masked_fill((gathered.ids < 0).unsqueeze(-1), 0)
            lanes = world.all_reduce(lanes.contiguous())
            return spec.kernels.sum_lanes(lanes[own], gathered.all_ids[own], spec.dtype)
        partial = spec.kernels.sum_lanes(rows, gathered.ids, torch.float32)
        return world.all_reduce(partial)[own].to(spec.dtype)


def _widest(replicas: Group, hidden: torch.Tensor) -> int:
    """Most tokens of a replica. A step that is being captured is padded to one size on all of them."""
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        return hidden.shape[0]
    mine = torch.tensor([hidden.shape[0]], dtype=torch.int64, device=hidden.device)
    return int(replicas.all_gather(mine).max())


def _padded(tensor: torch.Tensor, length: int, value: float) -> torch.Tensor:
    missing = length - tensor.shape[0]
    if missing == 0:
        return tensor.contiguous()
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=value)
