"""torch_npu's ``npu_moe_distribute_dispatch`` and ``_combine`` over gloo, with the published limits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

SIZES = (2, 16, 32, 64)
"""Published: 16, 32 and 64; two ranks stand in for them here."""
GROUPS: dict[str, dist.ProcessGroup] = {}


def gather(group: str, value: object) -> list[Any]:
    everyone: list[Any] = [None] * GROUPS[group].size()
    dist.all_gather_object(everyone, value, GROUPS[group])
    return everyone


def check(ids: torch.Tensor, group: str, size: int, rank: int, experts: int, global_bs: int) -> None:
    assert 1 <= len(group) < 128
    assert size in SIZES
    assert size == GROUPS[group].size()
    assert rank == GROUPS[group].rank()
    assert 1 <= experts <= 512
    assert experts % size == 0
    assert experts // size <= 24
    assert ids.dtype == torch.int32
    assert 0 < ids.shape[0] <= 256
    assert 0 < ids.shape[1] <= 16
    assert bool(((ids >= 0) & (ids < experts)).all()), "-1 is no expert"
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert global_bs % size == 0
    assert ids.shape[0] <= global_bs // size
    assert len(set(gather(group, (size, experts, global_bs)))) == 1, "arguments differ between ranks"


def npu_moe_distribute_dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expert_scales: torch.Tensor,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> tuple[Any, ...]:
    check(expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs)
    assert x.dtype == torch.bfloat16
    assert 0 < x.shape[1] <= 7168
    assert x.shape[1] % 32 == 0
    assert quant_mode == 0
    assert expert_token_nums_type == 1
    assert expert_scales.shape == expert_ids.shape
    assert expert_scales.dtype == torch.float32
    everyone = gather(group_ep, (x.clone(), expert_ids.clone(), expert_scales.clone()))
    local, k = moe_expert_num // ep_world_size, expert_ids.shape[1]
    room = global_bs * min(local, k)
    rows = torch.full((room, x.shape[1]), torch.nan, dtype=x.dtype)
    scales, origins = torch.zeros(room), []
    counts = torch.zeros(local, dtype=torch.int64)
    for expert in range(local):
        for source, (theirs, ids, weights) in enumerate(everyone):
            for token, lane in (ids == ep_rank_id * local + expert).nonzero().tolist():
                rows[len(origins)], scales[len(origins)] = theirs[token], weights[token, lane]
                origins.append((source, token, lane))
                counts[expert] += 1
    index = torch.zeros(expert_ids.numel(), dtype=torch.int32)
    return rows, None, index, counts, torch.tensor(origins, dtype=torch.int32), None, scales


def npu_moe_distribute_combine(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    expand_scales: torch.Tensor,
    global_bs: int = 0,
) -> torch.Tensor:
    check(expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs)
    local = moe_expert_num // ep_world_size
    assert expand_x.shape[0] == global_bs * min(local, expert_ids.shape[1])
    assert expand_x.dtype == torch.bfloat16
    assert expand_idx.numel() == expert_ids.numel()
    assert expand_scales.shape == (expand_x.shape[0],)
    outgoing = [
        (*origin, expand_x[at].clone()) for at, origin in enumerate(ep_send_counts.view(-1, 3).tolist())
    ]
    total = torch.zeros(expert_ids.shape[0], expand_x.shape[1])
    for sent in gather(group_ep, outgoing):
        for owner, token, lane, value in sent:
            if owner == ep_rank_id:
                total[token] += value.float() * expert_scales[token, lane]
    return total.to(expand_x.dtype)


def module() -> ModuleType:
    fake = ModuleType("torch_npu")
    fake.__dict__.update(
        npu_moe_distribute_dispatch=npu_moe_distribute_dispatch,
        npu_moe_distribute_combine=npu_moe_distribute_combine,
    )
    return fake
