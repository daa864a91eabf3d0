"""Dispatch and combine through DeepEP's ElasticBuffer.

A row travels once to each rank that wants it. Decode never waits for the host: the library hands over room
for R * T rows, and our copies put each lane into the masked slab. Prefill waits for the counts, and the rows
are laid out contiguously. The library's handle tells where a lane lies (``recv_src_metadata``, columns 2 and
up): written with our places, it brings results home straight from the layout, without a copy back.

One buffer serves both phases; each dispatch names its own T. Rows handed to the runner in decode are views of
the slab, which the next dispatch overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.checked import ROW_DTYPES, CheckedDispatcher, buffer_shape
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.deepep_v2 import BACKEND
from interlock.moe.a2a.deepep_v2.buffer import library_call, load_elastic, open_buffer, share_of_sms
from interlock.moe.a2a.deepep_v2.expansion import Lanes, ordered_lanes
from interlock.moe.a2a.deepep_v2.row_copies import Target, copy_lanes
from interlock.moe.a2a.deepep_v2.sizes import DIRECT, HYBRID, fixed_bytes
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows
from interlock.moe.terms import Layout, Phase

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Received:
    """One row for each (token, this rank), by source rank: rows [N, h], scales [N, h / 128] or None,
    ids int64 [N, k] (local, -1 elsewhere), weights float32 [N, k], and the library's handle."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    handle: Any

    @property
    def count(self) -> torch.Tensor:
        """How many rows are real, int32 []."""
        ends: torch.Tensor = self.handle.psum_num_recv_tokens_per_scaleup_rank
        return ends[-1]


class DeepEpV2(CheckedDispatcher):
    """Backend ``deepep_v2``, over ``groups.ep``. Building it is collective: buffer, barrier, kernels."""

    def __init__(self, spec: DispatcherSpec, declaration: A2ABackend = BACKEND) -> None:
        super().__init__(spec, declaration)
        self._buffer: Any = open_buffer(load_elastic(), spec)
        self._local = len(spec.local_experts)
        self._slab = _slab(spec, max(map(self._slab_rows, spec.capacity)) * self._local)
        self.buffer_bytes = fixed_bytes(buffer_shape(spec))
        self._sms = share_of_sms(spec)
        self._step = 0
        self._broken = False
        self._compile()

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        masked = self.spec.layouts[phase] is Layout.MASKED
        if not masked and hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ContractError(f"{phase.value} waits for the host here: no CUDA graph can capture it")
        if hidden.shape[0] == 0 and not masked:
            hidden, ids, weights, scales = _row_for_nobody(self.spec)
        self._step += 1
        received = self._send(hidden, ids, weights, scales, phase)
        tokens = len(self.spec.experts) * self.spec.capacity[phase]
        metadata = received.handle.recv_src_metadata
        lanes = ordered_lanes(received.ids, metadata[:, 0], received.count, self._local, tokens)
        lay_out = self._masked if masked else self._contiguous
        rows, slots = lay_out(received, lanes, phase)
        metadata[:, 2:] = slots
        received.handle.do_expand = True
        return rows, received.handle

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        flat = rows.reshape(-1, self.spec.hidden_size).contiguous()
        with self._library_call("combine"):
            combined, _, _ = self._buffer.combine(flat, handle=state)
        home: torch.Tensor = combined[:num_tokens]
        return home

    def _send(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        phase: Phase,
    ) -> _Received:
        spec = self.spec
        sent = hidden.contiguous()
        with self._library_call("dispatch"):
            received, local_ids, local_weights, handle, _ = self._buffer.dispatch(
                sent if scales is None else (sent, scales.contiguous()),
                topk_idx=ids.contiguous(),
                topk_weights=weights.contiguous(),
                num_experts=spec.num_experts,
                num_max_tokens_per_rank=spec.capacity[phase],
                expert_alignment=spec.alignment,
                do_cpu_sync=spec.layouts[phase] is not Layout.MASKED,
                num_sms=self._sms,
                do_expand=False,
            )
        rows, row_scales = received if isinstance(received, tuple) else (received, None)
        return _Received(rows, row_scales, local_ids, local_weights, handle)

    @contextmanager
    def _library_call(self, what: str) -> Iterator[None]:
        """Once a call fails, the peers are in another step: the buffer is not destroyed together any more."""
        try:
            with library_call(what, self._step):
                yield
        except BaseException:
            self._broken = True
            raise

    def _masked(self, received: _Received, lanes: Lanes, phase: Phase) -> tuple[MaskedRows, torch.Tensor]:
        most = self._slab_rows(phase)
        starts = torch.arange(self._local, device=lanes.counts.device) * most
        used, shape = self._local * most, (self._local, most)
        slots = lanes.slots(starts)
        target = self._slab
        copy_lanes(slots, received.rows, received.weights, received.scales, target)
        rows = MaskedRows(
            rows=target.rows[:used].view(*shape, -1),
            counts=lanes.counts.to(torch.int32),
            weights=target.weights[:used].view(shape),
            scales=None if target.scales is None else target.scales[:used].view(*shape, -1),
        )
        return rows, slots

    def _contiguous(
        self, received: _Received, lanes: Lanes, phase: Phase
    ) -> tuple[ContiguousRows, torch.Tensor]:
        alignment = self.spec.alignment
        ends = ((lanes.counts + (alignment - 1)) // alignment * alignment).cumsum(0)
        starts = ends.roll(1)
        starts[0] = 0
        slots = lanes.slots(starts)
        target = _slab(self.spec, sum(received.handle.num_recv_tokens_per_expert_list))
        copy_lanes(slots, received.rows, received.weights, received.scales, target)
        rows = ContiguousRows(
            rows=target.rows,
            psum=(starts + lanes.counts).to(torch.int32),
            counts=lanes.counts.to(torch.int32),
            alignment=alignment,
            weights=target.weights,
            scales=target.scales,
        )
        return rows, slots

    def _slab_rows(self, phase: Phase) -> int:
        """M of a phase with the masked layout, else 0: every rank may send all its tokens to one expert."""
        masked = self.spec.layouts[phase] is Layout.MASKED
        return len(self.spec.experts) * self.spec.capacity[phase] if masked else 0

    def _compile(self) -> None:
        """One token of every rank through each phase, in step with the others: nvcc runs now, not later."""
        spec = self.spec
        for phase in spec.capacity:
            hidden, ids, weights, scales = _row_for_nobody(spec)
            ids = torch.arange(spec.top_k, device=spec.device).unsqueeze(0)
            spec.groups.ep.barrier()
            rows, handle = self._dispatch(hidden, ids, weights, phase, scales)
            spec.groups.ep.barrier()
            flat = rows.rows.reshape(-1, spec.hidden_size)
            self._combine(torch.zeros_like(flat, dtype=spec.dtype), 1, handle)
        if spec.device.type == "cuda":
            torch.cuda.synchronize()
        spec.groups.ep.barrier()

    def _mode(self) -> str:
        hybrid: bool = self._buffer.allow_hybrid_mode
        return HYBRID if hybrid else DIRECT

    def close(self) -> None:
        """Free the buffer; collective, as building it was, unless a call failed. Idempotent."""
        if self._closed:
            return
        super().close()
        if not self._broken:
            self._buffer.destroy()


def _slab(spec: DispatcherSpec, rows: int) -> Target:
    """Uninitialised rows: what no lane fills may hold anything."""
    groups = -(-spec.hidden_size // 128)
    device = spec.device
    return Target(
        rows=torch.empty(rows, spec.hidden_size, dtype=ROW_DTYPES[spec.row_dtype], device=device),
        weights=torch.empty(rows, device=device),
        scales=torch.empty(rows, groups, device=device) if spec.row_dtype == "fp8" else None,
    )


def _row_for_nobody(spec: DispatcherSpec) -> Inputs:
    """One row without a destination: where the host waits for counts, an idle rank must take part too."""
    groups = -(-spec.hidden_size // 128)
    device = spec.device
    return (
        torch.zeros(1, spec.hidden_size, device=device).to(ROW_DTYPES[spec.row_dtype]),
        torch.full((1, spec.top_k), -1, device=device),
        torch.zeros(1, spec.top_k, device=device),
        torch.ones(1, groups, device=device) if spec.row_dtype == "fp8" else None,
    )
