"""Dispatch and combine through shared memory: two native calls each, and no collective.

A token's row is written once into the mailbox of every rank that holds one of its experts; each rank then
copies its mail to the experts that want it. Results are written straight into the memory of the token's home,
one for each lane, and summed there in lane order.

Rows handed to the runner are views of buffers that the next dispatch overwrites.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlock.errors import EngineDeadError
from interlock.moe.a2a.checked import ROW_DTYPES, CheckedDispatcher, buffer_shape
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows
from interlock.moe.a2a.shared_memory import BACKEND, link
from interlock.moe.a2a.shared_memory.segment import share_segments
from interlock.moe.a2a.shared_memory.shape import SegmentShape, assembled_rows
from interlock.moe.terms import Layout, Phase

_SLICE_NS = 100_000_000
"""Longest time in native code before Python may look at signals and at the deadline."""


@dataclass(slots=True)
class _Buffers:
    """Private memory: rows [R, h] and what belongs to each, for the larger phase; views by layout."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor
    origins: torch.Tensor
    counts: torch.Tensor
    psum: torch.Tensor


class SharedMemory(CheckedDispatcher):
    """Backend ``shared_memory``, over ``groups.ep``."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, BACKEND)
        shape = buffer_shape(spec)
        where = SegmentShape.of(shape)
        self._exchange = link.exchange()
        self._segments = share_segments(spec.groups.ep, where.total)
        self._results = self._segments[spec.rank][where.results :][
            : where.capacity * spec.top_k * where.result_bytes
        ].view(spec.dtype)
        self._results = self._results.view(where.capacity, spec.top_k, spec.hidden_size)
        most = -(-spec.num_experts // len(spec.experts))
        self._buffers = _allocate(spec, assembled_rows(shape, most))
        self.buffer_bytes = BACKEND.buffer_bytes(shape)
        self._maps = _expert_maps(spec)
        self._link = _describe(spec, where, self._segments, self._maps)
        self._step = 0
        self._total_rows, self._culprit = ctypes.c_int64(), ctypes.c_int64()

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        if hidden.stride(-1) != 1:
            hidden = hidden.contiguous()
        ids, weights = ids.contiguous(), weights.contiguous()
        scales = None if scales is None else scales.contiguous()
        step = self._step + 1
        status = self._exchange.send(
            ctypes.addressof(self._link),
            step,
            hidden.shape[0],
            hidden.data_ptr(),
            hidden.stride(0) * hidden.element_size(),
            None if scales is None else scales.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            self._culprit,
        )
        if status == link.BAD_ID:
            token, lane = divmod(self._culprit.value, self.spec.top_k)
            raise ContractError(
                f"token {token} names expert {int(ids[token, lane])}: "
                f"ids must be in [0, {self.spec.num_experts}) or -1"
            )
        self._step = step
        masked = self.spec.layouts[phase] is Layout.MASKED
        slab_rows = len(self.spec.experts) * self.spec.capacity[phase] if masked else 0
        buffers = self._buffers
        self._until_all(
            "dispatch",
            lambda: self._exchange.receive(
                ctypes.addressof(self._link),
                step,
                _SLICE_NS,
                slab_rows,
                self.spec.alignment,
                buffers.rows.shape[0],
                buffers.rows.data_ptr(),
                None if buffers.scales is None else buffers.scales.data_ptr(),
                buffers.weights.data_ptr(),
                buffers.origins.data_ptr(),
                buffers.counts.data_ptr(),
                buffers.psum.data_ptr(),
                self._total_rows,
                self._culprit,
            ),
        )
        return self._view(slab_rows, self._total_rows.value), (ids, step)

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        ids, step = state
        buffers = self._buffers
        rows = rows.contiguous()
        self._exchange.give_back(
            ctypes.addressof(self._link),
            step,
            rows.data_ptr(),
            buffers.origins.data_ptr(),
            buffers.counts.data_ptr(),
            buffers.psum.data_ptr(),
        )
        self._until_all(
            "combine",
            lambda: self._exchange.collect(ctypes.addressof(self._link), step, _SLICE_NS, self._culprit),
        )
        return self.spec.kernels.sum_lanes(self._results[:num_tokens], ids, self.spec.dtype)

    def _until_all(self, what: str, attempt: Callable[[], int]) -> None:
        """Repeat ``attempt`` while it says WAITING, up to the time limit."""
        status = attempt()
        deadline = time.monotonic() + self.spec.timeout
        while status == link.WAITING and time.monotonic() < deadline:
            status = attempt()
        if status == link.OK:
            return
        rank = self._culprit.value
        if status == link.WAITING:
            raise EngineDeadError(
                f"expert-parallel rank {rank} did not reach the {what} of step {self._step} "
                f"within {self.spec.timeout:g} s"
            )
        if status == link.STALE:
            raise EngineDeadError(
                f"expert-parallel rank {rank} is not in step {self._step}: its mail is stale"
            )
        raise ContractError(f"more rows arrived than the buffers of {self._buffers.rows.shape[0]} rows hold")

    def _view(self, slab_rows: int, total: int) -> ExpertInput:
        buffers = self._buffers
        if slab_rows:
            slab = (len(self.spec.local_experts), slab_rows)
            scales = buffers.scales
            return MaskedRows(
                rows=buffers.rows[:total].view(*slab, -1),
                counts=buffers.counts,
                weights=buffers.weights[:total].view(slab),
                scales=None if scales is None else scales[:total].view(*slab, -1),
            )
        return ContiguousRows(
            rows=buffers.rows[:total],
            psum=buffers.psum,
            counts=buffers.counts,
            alignment=self.spec.alignment,
            weights=buffers.weights[:total],
            scales=None if buffers.scales is None else buffers.scales[:total],
        )

    def close(self) -> None:
        """Unmap everything; the memory goes with the last rank that does."""
        super().close()
        self._segments.clear()
        self._results = torch.empty(0)


def _allocate(spec: DispatcherSpec, rows: int) -> _Buffers:
    groups = -(-spec.hidden_size // 128)
    local = len(spec.local_experts)
    return _Buffers(
        rows=torch.empty(rows, spec.hidden_size, dtype=ROW_DTYPES[spec.row_dtype]),
        scales=torch.empty(rows, groups) if spec.row_dtype == "fp8" else None,
        weights=torch.empty(rows),
        origins=torch.empty(rows, 3, dtype=torch.int32),
        counts=torch.zeros(local, dtype=torch.int32),
        psum=torch.zeros(local, dtype=torch.int32),
    )


def _expert_maps(spec: DispatcherSpec) -> torch.Tensor:
    """int32 [2, E]: owner and local id of each expert."""
    maps = torch.empty(2, spec.num_experts, dtype=torch.int32)
    for rank, held in enumerate(spec.experts):
        maps[0, held.start : held.stop] = rank
        maps[1, held.start : held.stop] = torch.arange(len(held))
    return maps


def _describe(
    spec: DispatcherSpec, where: SegmentShape, segments: list[torch.Tensor], maps: torch.Tensor
) -> link.Link:
    addresses = [segment.data_ptr() for segment in segments]
    return link.Link(
        ranks=len(segments),
        rank=spec.rank,
        top_k=spec.top_k,
        num_experts=spec.num_experts,
        local_experts=len(spec.local_experts),
        row_bytes=where.row_bytes,
        scale_bytes=where.scale_bytes,
        result_bytes=where.result_bytes,
        dispatch_flags=where.dispatch_flags,
        return_flags=where.return_flags,
        mailboxes=where.mailboxes,
        mailbox_bytes=where.mailbox_bytes,
        mailbox_rows=where.mailbox_rows,
        mailbox_scales=where.mailbox_scales,
        results=where.results,
        segments=(ctypes.c_void_p * link.MAX_RANKS)(*addresses),
        owner=maps[0].data_ptr(),
        local_id=maps[1].data_ptr(),
    )
