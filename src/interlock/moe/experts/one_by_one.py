"""One expert after the other on its rows: how the reference runners run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.fp8_rows import dequantise_rows
from interlock.moe.layouts import expert_rows


def run_one_by_one(
    rows: ExpertInput,
    spec: RunnerSpec,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
    *,
    reads: torch.dtype,
) -> tuple[torch.Tensor, int]:
    """What ``Runner.run`` gives back, and the number of rows that were computed.

    Args:
        expert: local expert, its rows [m, h] -> [m, h]; not called without rows.
        reads: dtype that fp8 rows become.
    """
    lists = expert_rows(rows, spec.num_experts)
    x = rows.rows if rows.scales is None else dequantise_rows(rows.rows, rows.scales, reads)
    x = x.flatten(0, -2)
    lead = rows.ids.shape if isinstance(rows, ReplicatedRows) else rows.rows.shape[:-1]
    out = torch.empty(*lead, spec.hidden_size, dtype=spec.dtype, device=x.device)
    flat = out.view(-1, spec.hidden_size)
    offsets: list[int] = lists.offsets.tolist()
    for index in range(spec.num_experts):
        part = slice(offsets[index], offsets[index + 1])
        if part.start == part.stop:
            continue
        result = expert(index, x[lists.source[part]])
        flat[lists.target[part]] = (result * lists.weight[part].unsqueeze(1)).to(spec.dtype)
    return out, offsets[-1]
