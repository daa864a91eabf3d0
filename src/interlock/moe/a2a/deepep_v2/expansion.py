"""From rows as they are received, one for each (token, rank), to one for each (token, expert), in our order.

DeepEP delivers the rows of a source in the order in which they arrived, which changes from run to run. The
order of the layouts is by (expert, source rank, token): each lane's place is counted in a table of experts x
tokens, whose shape is fixed, so nothing here waits for the host or depends on what was routed.

Legend: N received rows (some may be unused), k lanes a row, L local experts, S = ranks * T source tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the lanes of received rows belong.

    experts int64 [N, k], -1 where a lane is unused; within int64 [N, k], place among the rows of its expert;
    counts int64 [L].
    """

    experts: torch.Tensor
    within: torch.Tensor
    counts: torch.Tensor

    def slots(self, starts: torch.Tensor) -> torch.Tensor:
        """Row of each lane, int32 [N, k], -1 for unused ones; experts begin at ``starts``, int64 [L]."""
        at = starts[self.experts.clamp_min(0)] + self.within
        return at.where(self.experts >= 0, -1).to(torch.int32)


def ordered_lanes(
    experts: torch.Tensor, sources: torch.Tensor, received: torch.Tensor | int, num_experts: int, tokens: int
) -> Lanes:
    """Count each lane's place.

    Args:
        experts: int64 [N, k], local expert of each lane, -1 unused; rows at and beyond ``received`` may hold
            anything.
        sources: int32 [N], global id of each row's token: source rank * T + token.
        received: how many rows are real.
        num_experts: L. tokens: S.
    """
    rows = torch.arange(experts.shape[0], device=experts.device)
    real = (rows < received).unsqueeze(1)
    experts = experts.where(real & (experts >= 0) & (experts < num_experts), -1)
    cell = experts * tokens + sources.to(torch.int64).unsqueeze(1)
    spare = num_experts * tokens
    cell = cell.where(experts >= 0, spare)
    table = torch.zeros(spare + 1, dtype=torch.int32, device=experts.device)
    table.scatter_(0, cell.flatten(), 1)
    places = table[:spare].view(num_experts, tokens).cumsum(1)
    within = places.flatten()[cell.clamp_max(spare - 1)] - 1
    return Lanes(experts=experts, within=within, counts=places[:, -1])
