"""Dispatch and combine through DeepEP v1's Buffer: normal mode lays out contiguously, low latency in slabs.

Normal kernels wait for the host and sum a token's rows rank by rank, rounding in between; so each lane is
sent as a token with one expert, comes home alone, and is added here in the contract's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.checked import CheckedDispatcher, buffer_shape
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.deepep import BACKEND
from interlock.moe.a2a.deepep.library import closed_to_torch_fills, load_library
from interlock.moe.a2a.deepep.sizes import NVLINK_PEERS, fixed_bytes, reserved
from interlock.moe.a2a.low_latency import gather_routes, row_weights
from interlock.moe.a2a.low_latency_sizes import library_capacity
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows
from interlock.moe.a2a.torch_groups import process_group, refuse_capture
from interlock.moe.layouts import aligned_segments, count_lanes, positions
from interlock.moe.terms import Layout, Phase

FLAG = "--moe-a2a-backend deepep"
QUEUES = 24
"""The library's own default of queue pairs; low latency wants at least one for each local expert."""


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Way back of a prefill step: received_at int64 [N], ids [n, k], and the library's handle."""

    received_at: torch.Tensor
    ids: torch.Tensor
    handle: Any


@dataclass(frozen=True, slots=True)
class _Slab:
    """Way back of a decode step."""

    ids: torch.Tensor
    handle: Any


class DeepEp(CheckedDispatcher):
    """Backend ``deepep``, over ``groups.ep``. Building it is collective."""

    def __init__(self, spec: DispatcherSpec, declaration: A2ABackend = BACKEND) -> None:
        super().__init__(spec, declaration)
        shape = buffer_shape(spec)
        self._local = len(spec.local_experts)
        self._tokens = library_capacity(spec.capacity[Phase.DECODE])
        self._buffer: Any = self._open(load_library(FLAG, "Buffer"), *reserved(shape))
        self.buffer_bytes = fixed_bytes(shape)

    def _open(self, library: Any, nvlink: int, rdma: int) -> Any:
        spec = self.spec
        refuse_capture(FLAG, spec.device)
        ranks = len(spec.experts)
        wanted = library.Buffer.get_low_latency_rdma_size_hint(
            self._tokens, spec.hidden_size, ranks, spec.num_experts
        )
        row = 2 * spec.hidden_size
        for settings in (library.Buffer.get_dispatch_config(ranks), library.Buffer.get_combine_config(ranks)):
            wanted = max(wanted, settings.get_rdma_buffer_size_hint(row, ranks))
            if settings.get_nvl_buffer_size_hint(row, ranks) > nvlink:
                raise StartupError(f"{FLAG}: the library wants more NVLink memory than the plan's {nvlink}")
        if wanted > rdma:
            raise StartupError(f"{FLAG}: the plan reserves {rdma} bytes, and the library wants {wanted}")
        return library.Buffer(
            process_group(spec.groups.ep),
            nvlink,
            rdma,
            low_latency_mode=True,
            num_qps_per_rank=max(QUEUES, self._local),
            explicitly_destroy=True,
        )

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        if self.spec.layouts[phase] is Layout.MASKED:
            return self._low_latency(hidden, ids, weights)
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ContractError(f"{phase.value} waits for the host here: no CUDA graph can capture it")
        return self._normal(hidden, ids, weights)

    def _low_latency(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[MaskedRows, _Slab]:
        spec, ids = self.spec, ids.contiguous()
        with closed_to_torch_fills():
            rows, counts, handle, _, _ = self._buffer.low_latency_dispatch(
                hidden.contiguous(), ids, self._tokens, spec.num_experts, use_fp8=False
            )
        tokens, ranges = handle[0], handle[1]
        routes = gather_routes(spec.groups.ep, ids, weights, self._tokens)
        found = row_weights(ranges, tokens, *routes, spec.local_experts.start)
        return MaskedRows(rows=rows, counts=counts, weights=found), _Slab(ids, handle)

    def _normal(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[ContiguousRows, _Lanes]:
        spec = self.spec
        lanes = hidden.repeat_interleave(spec.top_k, dim=0)
        experts, lane_weights = ids.reshape(-1, 1), weights.reshape(-1, 1)
        if lanes.shape[0] == 0:  # the kernels want a row of every rank
            lanes, experts = lanes.new_zeros(1, spec.hidden_size), ids.new_full((1, 1), -1)
            lane_weights = weights.new_zeros(1, 1)
        with closed_to_torch_fills():
            to_ranks, to_machines, to_experts, is_in_rank, _ = self._buffer.get_dispatch_layout(
                experts, spec.num_experts
            )
            rows, local, row_weights_, _, handle, _ = self._buffer.dispatch(
                lanes,
                num_tokens_per_rank=to_ranks,
                num_tokens_per_rdma_rank=to_machines,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=to_experts,
                topk_idx=experts,
                topk_weights=lane_weights,
                expert_alignment=1,
            )
        return self._lay_out(rows, local[:, 0], row_weights_[:, 0], ids, handle)

    def _lay_out(
        self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, handle: Any
    ) -> tuple[ContiguousRows, _Lanes]:
        alignment = self.spec.alignment
        counts = count_lanes(experts, self._local)
        segments = aligned_segments(counts, alignment)
        at = positions(experts, segments)
        laid_out = rows.new_empty(segments.rows, rows.shape[1])
        laid_out[at] = rows
        spread = weights.new_zeros(segments.rows)
        spread[at] = weights
        laid = ContiguousRows(
            rows=laid_out,
            psum=segments.psum.to(torch.int32),
            counts=counts.to(torch.int32),
            alignment=alignment,
            weights=spread,
        )
        return laid, _Lanes(at, ids, handle)

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        spec = self.spec
        with closed_to_torch_fills():
            if isinstance(state, _Slab):
                ones = torch.ones(state.ids.shape, device=rows.device)
                combined, _, _ = self._buffer.low_latency_combine(
                    rows.contiguous(), state.ids, ones, state.handle
                )
                home: torch.Tensor = combined
                return home
            way: _Lanes = state
            results = rows.reshape(-1, spec.hidden_size)[way.received_at].contiguous()
            returned, _, _ = self._buffer.combine(results, way.handle)
        if spec.nodes > 1 or len(spec.experts) > NVLINK_PEERS:
            self._clean()
        lanes = returned[: num_tokens * spec.top_k].view(num_tokens, spec.top_k, spec.hidden_size)
        return spec.kernels.sum_lanes(lanes, way.ids, spec.dtype)

    def _clean(self) -> None:
        """Between machines normal mode dirties what low latency, and graphs of it, expect to be zero."""
        spec = self.spec
        self._buffer.clean_low_latency_buffer(self._tokens, spec.hidden_size, spec.num_experts)

    def close(self) -> None:
        """Free the buffer; collective, as building it was. Idempotent."""
        if not self._closed:
            super().close()
            self._buffer.destroy()
