"""Single-process loops: what every rank must receive, and what every token must become."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.moe.conformance.cases import Case, Setting
from interlock.moe.fp8_rows import dequantise_rows
from interlock.moe.placement import place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Lane:
    """One (token, expert) pair that a rank computes, in the order (expert, source rank, token)."""

    local_expert: int
    source: int
    token: int
    weight: float


def lanes_of(case: Case, setting: Setting, rank: int) -> list[Lane]:
    """All lanes of the experts that ``rank`` holds."""
    held = place(setting.num_experts, setting.ranks)[rank]
    lanes = []
    for expert in held:
        for source in range(setting.ranks):
            where = (case.ids[source] == expert).nonzero().tolist()
            lanes += [
                Lane(expert - held.start, source, token, float(case.weights[source][token, lane]))
                for token, lane in where
            ]
    return lanes


def result_of(row: torch.Tensor, factor: float, weight: float, dtype: torch.dtype) -> torch.Tensor:
    """The expert's weighted result for one row [h] (already dequantised), exact by construction."""
    return (row.double() * (factor * weight)).to(dtype)


def plain_rows(case: Case, setting: Setting, rank: int) -> torch.Tensor:
    """The rows of ``rank`` in the result dtype [n, h]."""
    dtype = DTYPES[setting.dtype]
    scales = case.scales[rank]
    if scales is None:
        return case.hidden[rank].to(dtype)
    return dequantise_rows(case.hidden[rank], scales, dtype)


def combined(case: Case, setting: Setting, rank: int) -> torch.Tensor:
    """The output of ``rank`` [n, h]: lanes summed in float64, where every term is exact, and rounded once."""
    dtype = DTYPES[setting.dtype]
    rows = plain_rows(case, setting, rank)
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for token, lane in (case.ids[rank] >= 0).nonzero().tolist():
        expert = int(case.ids[rank][token, lane])
        weight = float(case.weights[rank][token, lane])
        total[token] += result_of(rows[token], setting.factor(expert), weight, dtype).double()
    return total.to(dtype)
