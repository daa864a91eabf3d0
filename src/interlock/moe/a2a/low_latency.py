"""What libraries with DeepEP v1's low-latency interface have in common: rows arrive without their weights.

Each expert's slab is filled by source ranks in ranges, in any order; a range lists its tokens. Weights are
gathered from all ranks in one collective of fixed shape and looked up by (source, token, expert), so that the
runner applies them as with every other backend and the library's combine is given ones.

Legend: L local experts, R ranks, T tokens a rank (the library's), M = R * T rows of a slab, k lanes a token.
"""

from __future__ import annotations

import torch

from interlock.parallel.group import Group

_LOW = (1 << 32) - 1


def gather_routes(
    group: Group, ids: torch.Tensor, weights: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [n, k] and weights [n, k] of all ranks: int32 and float32 [R, T, k], ids -1 where unused."""
    n, k = ids.shape
    mine = ids.new_full((tokens, 2 * k), -1, dtype=torch.int32)
    mine[:n, :k] = ids.to(torch.int32)
    mine[:n, k:] = weights.contiguous().view(torch.int32)
    everyone = group.all_gather(mine).view(group.size, tokens, 2 * k)
    return everyone[..., :k], everyone[..., k:].contiguous().view(torch.float32)


def row_weights(
    ranges: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first_expert: int
) -> torch.Tensor:
    """The weight of every filled row, float32 [L, M]; 0 for others. Nothing waits for the host.

    Args:
        ranges: int64 [L, R]: count in the low 32 bits, first row in the high ones.
        tokens: int32 [L, M]: the token within its source; rows outside all ranges may hold anything.
        ids, weights: int32 and float32 [R, T, k] of all ranks.
        first_expert: global id of the first local expert.
    """
    local, slab = tokens.shape
    begins, counts = ranges >> 32, ranges & _LOW
    rows = torch.arange(slab, device=tokens.device)
    inside = (rows >= begins.unsqueeze(2)) & (rows < (begins + counts).unsqueeze(2))
    filled, source = inside.any(1), inside.to(torch.uint8).argmax(1)
    token = tokens.to(torch.int64).where(filled, 0)
    experts = torch.arange(first_expert, first_expert + local, device=tokens.device).view(-1, 1, 1)
    chosen = (ids[source, token] == experts) & filled.unsqueeze(2)
    return torch.where(chosen, weights[source, token], 0.0).sum(2)
