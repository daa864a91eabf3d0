"""ElasticBuffer of DeepEP 2.1 over gloo: moves real rows between CPU processes, and enforces its rules.

Every assertion stands for one of the library's own (host asserts of ``csrc/elastic/buffer.hpp``, device
asserts of its kernels) or of its documentation. What the library leaves undefined is filled with garbage:
rows beyond what was received, slots of handles without expansion. Rows of one source arrive in random order.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

BUFFER_ALIGNMENT = 2 << 20
GARBAGE = -(2**30)


def align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Handle:
    """EPHandle: the fields that combine reads."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
        self.combined = False


class ElasticBuffer:
    """One rank's buffer. ``nodes`` (a class attribute) says how many machines NCCL would find."""

    nodes = 1
    all_nvlink = True
    gin = True
    alive: ClassVar[list[ElasticBuffer]] = []

    @classmethod
    def get_buffer_size_hint(
        cls,
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        assert num_max_tokens_per_rank > 0
        assert hidden > 0
        topk = num_topk or 32
        ranks, tokens = group.size(), num_max_tokens_per_rank
        across = cls.nodes if allow_hybrid_mode else 1
        within = ranks // across
        send = 0 if cls.all_nvlink or across > 1 else 1
        scales = align(4 * -(-hidden // 32), 32) if use_fp8_dispatch else 0
        out = align(hidden * (1 if use_fp8_dispatch else 2), 32) + scales + align(12 * topk + 4, 32)
        home = align(2 * hidden, 32) + align(8 * topk, 32)

        def layout(limit: int) -> int:
            return min(limit, topk) if allow_multiple_reduction else topk

        if across == 1:
            dispatch = (send + ranks) * tokens * out
            sends = send * ranks * tokens * (1 if allow_multiple_reduction else topk)
            combine = (sends + layout(ranks) * tokens) * home
        else:
            dispatch = (within * across * tokens + tokens + across * (tokens + 1280)) * out
            waiting = (1 if allow_multiple_reduction else topk) * across * (tokens + 1280)
            combine = (layout(within) * across * tokens + waiting + layout(across) * tokens) * home
        return align(max(dispatch, combine), BUFFER_ALIGNMENT)

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_bytes is None or num_bytes % BUFFER_ALIGNMENT == 0
        if group.size() > 1 and not self.gin:
            raise RuntimeError(
                "Assertion error: NCCL GIN is unavailable. This is usually due to a network configuration"
            )
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.num_bytes = num_bytes or self.get_buffer_size_hint(
            group,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_hybrid_mode,
            allow_multiple_reduction,
        )
        arguments = [None] * self.ranks
        mine = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode)
        dist.all_gather_object(arguments, mine, group)  # construction is collective
        assert len(set(arguments)) == 1, arguments
        self.num_max_tokens_per_rank, self.hidden = num_max_tokens_per_rank, hidden
        self.deterministic, self.fp8 = deterministic, use_fp8_dispatch
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.explicitly_destroy = explicitly_destroy
        self.timeouts = (num_cpu_timeout_secs, num_gpu_timeout_secs)
        self.pending: Handle | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.shuffle = random.Random(self.rank)
        ElasticBuffer.alive.append(self)
        dist.barrier(group)

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: object = None,
        previous_event_before_epilogue: object = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Handle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, ...]:
        assert not (
            torch.are_deterministic_algorithms_enabled()
            and torch.utils.deterministic.fill_uninitialized_memory
        )
        assert handle is None, "cached handles are for training"
        assert not do_expand, "not modelled here: rows come once for each rank"
        rows, scales = x if isinstance(x, tuple) else (x, None)
        tokens, alignment = num_max_tokens_per_rank or self.num_max_tokens_per_rank, expert_alignment or 1
        wait = True if do_cpu_sync is None else do_cpu_sync
        self._check_inputs(rows, scales, topk_idx, topk_weights, num_experts, tokens)
        agreed = [None] * self.ranks
        dist.all_gather_object(agreed, (num_experts, tokens, alignment, wait, rows.dtype), self.group)
        assert len(set(agreed)) == 1, f"collective arguments differ: {agreed}"
        self.calls.append(("dispatch", {"n": rows.shape[0], "T": tokens, "cpu_sync": wait}))
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(
            everyone,
            (
                rows.view(torch.uint8).clone(),
                None if scales is None else scales.clone(),
                topk_idx,
                topk_weights,
            ),
            self.group,
        )
        return self._deliver(everyone, rows, scales, topk_idx, num_experts, tokens, alignment, wait)

    def _check_inputs(
        self,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        num_experts: int | None,
        tokens: int,
    ) -> None:
        assert ids is not None
        assert weights is not None
        assert num_experts is not None
        assert num_experts % self.ranks == 0
        assert num_experts <= 2048
        assert num_experts // self.ranks <= 256
        assert self.ranks <= 1024
        assert rows.dim() == 2
        assert rows.is_contiguous()
        assert rows.shape[1] * rows.element_size() % 32 == 0
        assert rows.shape[0] <= tokens
        assert tokens <= self.num_max_tokens_per_rank, "the buffer was sized for fewer"
        assert rows.dtype == (torch.float8_e4m3fn if scales is not None else torch.bfloat16)
        assert (scales is not None) == self.fp8, "the buffer was sized for the other dtype"
        if scales is not None:
            assert scales.shape[0] == rows.shape[0]
            assert scales.element_size() == 4
        assert ids.dtype == torch.int64
        assert ids.is_contiguous()
        assert ids.shape[0] == rows.shape[0]
        assert ids.shape[1] <= 32
        assert weights.shape == ids.shape
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        for row in ids.tolist():
            used = [expert for expert in row if expert >= 0]
            assert len(used) == len(set(used)), "a repeated expert traps on the device"

    def _deliver(
        self,
        everyone: list[Any],
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        num_experts: int,
        tokens: int,
        alignment: int,
        wait: bool,
    ) -> tuple[Any, ...]:
        local, k = num_experts // self.ranks, ids.shape[1]
        first = self.rank * local
        found: list[tuple[int, int]] = []
        ends = []
        for source in range(self.ranks):
            their = everyone[source][2]
            here = [
                t for t in range(their.shape[0]) if any(first <= e < first + local for e in their[t].tolist())
            ]
            self.shuffle.shuffle(here)
            found += [(source, token) for token in here]
            ends.append(len(found))
        room = len(found) if wait else self.ranks * tokens
        out = torch.full((room, rows.shape[1] * rows.element_size()), 0x7F, dtype=torch.uint8)
        out_scales = None if scales is None else torch.full((room, scales.shape[1]), torch.nan)
        out_ids = torch.full((room, k), GARBAGE, dtype=torch.int64)
        out_weights = torch.full((room, k), torch.nan)
        metadata = torch.full((room, k + 2), GARBAGE, dtype=torch.int32)
        counts = [0] * local
        for at, (source, token) in enumerate(found):
            payload, their_scales, their, weights = everyone[source]
            out[at] = payload[token]
            if out_scales is not None:
                out_scales[at] = their_scales[token]
            mine = [e - first if first <= e < first + local else -1 for e in their[token].tolist()]
            out_ids[at], out_weights[at] = torch.tensor(mine), weights[token]
            lane = next(index for index, expert in enumerate(mine) if expert >= 0)
            metadata[at, 0] = source * tokens + token
            metadata[at, 1] = source * k + lane
            for expert in mine:
                if expert >= 0:
                    counts[expert] += 1
        handle = Handle(
            do_expand=False,
            num_experts=num_experts,
            num_max_tokens_per_rank=tokens,
            topk_idx=ids.clone(),
            num_recv_tokens=room,
            num_recv_tokens_per_expert_list=[align(count, alignment) for count in counts] if wait else [],
            psum_num_recv_tokens_per_scaleup_rank=torch.tensor(ends, dtype=torch.int32),
            recv_src_metadata=metadata,
        )
        received = out.view(rows.dtype)
        answer = received if out_scales is None else (received, out_scales)
        return answer, out_ids, out_weights, handle, None

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None = None,
        bias: object = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: object = None,
        previous_event_before_epilogue: object = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        assert not handle.combined, "a handle belongs to one combine"
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] % 256 == 0
        assert handle.do_expand, "only lanes of the expanded layout come home unsummed"
        assert topk_weights is None, "forbidden for expanded rows without reductions on the way"
        assert not self.allow_multiple_reduction
        handle.combined = True
        self.calls.append(("combine", {"rows": x.shape[0]}))
        k, tokens = handle.topk_idx.shape[1], handle.num_max_tokens_per_rank
        outgoing = []
        for row in handle.recv_src_metadata[: int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])].tolist():
            for lane, slot in enumerate(row[2:]):
                assert -1 <= slot < x.shape[0], "a slot outside the rows"
                if slot >= 0:
                    outgoing.append((row[1] // k, row[0] % tokens, lane, x[slot].clone()))
        everyone: list[Any] = [None] * self.ranks
        dist.all_gather_object(everyone, outgoing, self.group)
        home = {
            (token, lane): value
            for sent in everyone
            for owner, token, lane, value in sent
            if owner == self.rank
        }
        total = torch.zeros(handle.topk_idx.shape[0], x.shape[1])
        for token, ids in enumerate(handle.topk_idx.tolist()):
            for lane, expert in enumerate(ids):
                if expert >= 0:
                    total[token] += home[token, lane].float()
        return total.to(torch.bfloat16), None, None

    def destroy(self) -> None:
        assert self.explicitly_destroy
        dist.barrier(self.group)
        ElasticBuffer.alive.remove(self)


def module() -> ModuleType:
    """Stands in for ``deep_ep``."""
    fake = ModuleType("deep_ep")
    fake.__dict__.update(ElasticBuffer=ElasticBuffer, topk_idx_t=torch.int64, __version__="2.1.0")
    return fake
