"""DeepEP v1's Buffer and Mooncake EP's over gloo: real rows between CPU processes, and the libraries' rules.

As on the devices: rows of a slab lie by source rank in ranges whose order changes, lists of tokens say which;
what nothing fills is garbage; normal mode sums a token's rows rank by rank in bfloat16.
"""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

GARBAGE = -(2**30)


def gather(group: dist.ProcessGroup, value: object) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group)
    return everyone


class LowLatency:
    """The slabs that both libraries exchange."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.pick = random.Random(self.rank)

    def send(self, x: torch.Tensor, ids: torch.Tensor, tokens: int, experts: int) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] % 128 == 0
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        assert x.shape[0] == ids.shape[0] <= tokens
        assert experts % self.ranks == 0
        assert self.ranks * tokens % 4 == 0
        everyone = gather(self.group, (x.clone(), ids.clone(), tokens, experts))
        assert len({each[2:] for each in everyone}) == 1, "collective arguments differ"
        local, slab = experts // self.ranks, self.ranks * tokens
        rows = torch.full((local, slab, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        lists = torch.full((local, slab), GARBAGE, dtype=torch.int32)
        ranges = torch.zeros(local, self.ranks, dtype=torch.int64)
        counts = torch.zeros(local, dtype=torch.int32)
        for expert in range(local):
            sources = list(range(self.ranks))
            self.pick.shuffle(sources)
            at = 0
            for source in sources:
                their, routes = everyone[source][:2]
                here = (routes == self.rank * local + expert).any(1).nonzero().flatten().tolist()
                self.pick.shuffle(here)
                ranges[expert, source] = at << 32 | len(here)
                for token in here:
                    rows[expert, at], lists[expert, at] = their[token], token
                    at += 1
            counts[expert] = at
        return rows, counts, (lists, ranges, tokens, x.shape[1], experts)

    def bring_home(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: tuple[Any, ...]
    ) -> torch.Tensor:
        lists, ranges, tokens, hidden, experts = handle
        local = experts // self.ranks
        assert x.shape == (local, self.ranks * tokens, hidden)
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert weights.dtype == torch.float32
        assert weights.shape == ids.shape
        outgoing = []
        for expert in range(local):
            for source in range(self.ranks):
                packed = int(ranges[expert, source])
                first, count = packed >> 32, packed & 0xFFFFFFFF
                for row in range(first, first + count):
                    outgoing.append(
                        (source, int(lists[expert, row]), self.rank * local + expert, x[expert, row].clone())
                    )
        home = {
            (token, expert): value
            for sent in gather(self.group, outgoing)
            for owner, token, expert, value in sent
            if owner == self.rank
        }
        total = torch.zeros(ids.shape[0], hidden)
        for token, row in enumerate(ids.tolist()):
            for lane, expert in enumerate(row):
                if expert >= 0:
                    total[token] += home[token, expert].float() * weights[token, lane]
        return total.to(torch.bfloat16)


class Config:
    def __init__(self, nvlink_chunk: int) -> None:
        self.chunk = nvlink_chunk

    def get_nvl_buffer_size_hint(self, row: int, ranks: int) -> int:
        peers, machines = min(ranks, 8), max(1, ranks // 8)
        slots = 10 * peers * self.chunk
        total = 10 * peers * (2 * machines + 3) * 4 + slots * (row + 8 + 128 * 8 + 128 * 4 + 128 * 4)
        return (total + 127) // 128 * 128

    def get_rdma_buffer_size_hint(self, row: int, ranks: int) -> int:
        assert ranks <= 8, "one machine is modelled"
        return 0


class Buffer:
    """v1. Dispatch without the layout's results, a call of the wrong mode and dirty memory are errors."""

    made: ClassVar[list[Buffer]] = []

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        groups = hidden // 128
        out, home = 16 + max(2 * hidden, hidden + 4 * groups), 4 * groups + 2 * hidden
        send = max(tokens * out, experts * tokens * home)
        receive = max(experts * tokens * out, experts * tokens * home)
        total = 2 * send + 2 * receive + 2 * ((4 * experts + 127) // 128 * 128)
        return (total + 128) // 128 * 128

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        assert ranks in (2, 4, 8), "no settings for this many ranks"
        return Config(256)

    get_combine_config = get_dispatch_config

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_nvl_bytes % 128 == 0
        assert num_rdma_bytes % 128 == 0
        assert low_latency_mode
        assert len(set(gather(group, (num_nvl_bytes, num_rdma_bytes, num_qps_per_rank)))) == 1
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self.bytes, self.queues = (num_nvl_bytes, num_rdma_bytes), num_qps_per_rank
        self.low_latency = LowLatency(group)
        self.explicitly_destroy = explicitly_destroy
        self.calls: list[str] = []
        Buffer.made.append(self)

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, tokens: int, experts: int, use_fp8: bool = True
    ) -> tuple[Any, ...]:
        assert not use_fp8
        assert topk_idx.shape[1] <= 11
        assert self.queues >= experts // self.ranks
        assert 2 * (tokens + 1) <= 1024, "the queues are too short"
        assert self.get_low_latency_rdma_size_hint(tokens, x.shape[1], self.ranks, experts) <= self.bytes[1]
        self.calls.append("low_latency_dispatch")
        rows, counts, handle = self.low_latency.send(x, topk_idx, tokens, experts)
        return rows, counts, handle, None, None

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        self.calls.append("low_latency_combine")
        return self.low_latency.bring_home(x, topk_idx, topk_weights, handle), None, None

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        local = num_experts // self.ranks
        owner = torch.where(topk_idx >= 0, topk_idx // local, -1)
        is_in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.ranks)], dim=1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank.contiguous(), None

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        num_tokens_per_rank: torch.Tensor,
        num_tokens_per_rdma_rank: torch.Tensor | None,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_alignment: int = 1,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[0] > 0, "the kernels want a row of every rank"
        assert is_token_in_rank.dtype == torch.bool
        assert is_token_in_rank.shape == (x.shape[0], self.ranks)
        assert topk_idx.shape == topk_weights.shape
        assert topk_weights.dtype == torch.float32
        experts = num_tokens_per_expert.shape[0]
        local = experts // self.ranks
        self.calls.append("dispatch")
        everyone = gather(self.group, (x.clone(), topk_idx.clone(), topk_weights.clone(), is_token_in_rank))
        found = [
            (source, token)
            for source in range(self.ranks)
            for token in everyone[source][3][:, self.rank].nonzero().flatten().tolist()
        ]
        k = topk_idx.shape[1]
        rows = torch.zeros(len(found), x.shape[1], dtype=torch.bfloat16)
        ids = torch.full((len(found), k), -1, dtype=torch.int64)
        weights = torch.zeros(len(found), k)
        for at, (source, token) in enumerate(found):
            rows[at], weights[at] = everyone[source][0][token], everyone[source][2][token]
            mine = everyone[source][1][token] - self.rank * local
            ids[at] = mine.where((mine >= 0) & (mine < local), -1)
        counts = torch.bincount(ids[ids >= 0], minlength=local).tolist()
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        return rows, ids, weights, aligned, SimpleNamespace(found=found, sent=x.shape[0]), None

    def combine(self, x: torch.Tensor, handle: Any) -> tuple[Any, ...]:
        assert x.shape[0] == len(handle.found)
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        self.calls.append("combine")
        outgoing = [(*where, x[at].clone()) for at, where in enumerate(handle.found)]
        total = torch.zeros(handle.sent, x.shape[1], dtype=torch.bfloat16)
        for sent in gather(self.group, outgoing):
            for owner, token, value in sent:
                if owner == self.rank:
                    total[token] += value
        return total, None, None

    def clean_low_latency_buffer(self, tokens: int, hidden: int, experts: int) -> None:
        self.calls.append("clean")

    def destroy(self) -> None:
        assert self.explicitly_destroy
        dist.barrier(self.group)


class MooncakeBuffer:
    """``mooncake.mooncake_ep_buffer.Buffer``; ``silent`` (of the class) lists ranks that do not answer."""

    silent: ClassVar[tuple[int, ...]] = ()

    @staticmethod
    def get_ep_buffer_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return 2 * (2 * experts * tokens * (16 + 2 * hidden))

    def __init__(self, group: dist.ProcessGroup, num_ep_buffer_bytes: int, disable_p2p: bool = False) -> None:
        assert len(set(gather(group, num_ep_buffer_bytes))) == 1
        self.low_latency = LowLatency(group)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        active_ranks: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool | None = None,
    ) -> tuple[Any, ...]:
        assert use_fp8 is False, "the default quantises"
        assert active_ranks.dtype == torch.int32
        assert active_ranks.numel() == self.low_latency.ranks
        assert timeout_us > 0
        rows, counts, handle = self.low_latency.send(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts
        )
        for rank in self.silent:
            active_ranks[rank] = 0
        return rows, counts, handle, None, None

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor,
        timeout_us: int,
        handle: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        assert active_ranks.numel() == self.low_latency.ranks
        return self.low_latency.bring_home(x, topk_idx, topk_weights, handle), None, None


def deep_ep() -> ModuleType:
    fake = ModuleType("deep_ep")
    fake.__dict__.update(Buffer=Buffer, topk_idx_t=torch.int64, __version__="1.2.1")
    return fake


def mooncake() -> ModuleType:
    fake = ModuleType("mooncake.mooncake_ep_buffer")
    fake.__dict__.update(Buffer=MooncakeBuffer)
    return fake
