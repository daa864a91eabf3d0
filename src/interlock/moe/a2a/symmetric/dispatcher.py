"""Dispatch and combine by one-sided copies, no collective: one launch each way for few tokens in slabs.

Few tokens (decode): ranks publish their rows and routes, and each takes what its experts need; results stay
where they are until the tokens' ranks read and sum them. See ``pulled``.

Else: counts go to every rank; from everybody's counts each rank knows where its lanes' rows belong, and
writes them there. The results of a lane are written to its token's rank, which sums them in lane order.

Rows handed to the runner are views of buffers that the next dispatch overwrites. In the contiguous layout the
host waits for the number of rows; the masked layout is never waited for, so it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interlock.kernels.triton.compile_ahead import rehearsing
from interlock.moe.a2a.checked import ROW_DTYPES, CheckedDispatcher, buffer_shape
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.rows import ExpertInput
from interlock.moe.a2a.symmetric import BACKEND
from interlock.moe.a2a.symmetric.exchange import NOTICE_WORDS, Arrived, Exchange
from interlock.moe.a2a.symmetric.memory import share_region
from interlock.moe.a2a.symmetric.notice import problem
from interlock.moe.a2a.symmetric.pulled import PulledExchange, waiting_programs
from interlock.moe.a2a.symmetric.shape import RegionShape
from interlock.moe.a2a.symmetric.views import contiguous_rows, masked_rows
from interlock.moe.terms import Layout, Phase

TOTAL = 4
"""Word of the notice with the rows that a contiguous dispatch takes up."""


@dataclass(frozen=True, slots=True)
class _WayBack:
    """ids [n, k] of this rank's tokens, and where the rows of others lie here; M of slabs of few tokens."""

    ids: torch.Tensor
    arrived: Arrived
    few_slab_rows: int = 0


class Symmetric(CheckedDispatcher):
    """Backend ``symmetric``, over ``groups.ep``."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, BACKEND)
        shape = RegionShape.of(buffer_shape(spec))
        self._notice = torch.zeros(NOTICE_WORDS, dtype=torch.int64, pin_memory=True)
        self._read = self._notice.numpy()
        self._region = share_region(spec.groups.ep, shape.region_bytes, _indexed(spec.device))
        self._exchange = Exchange(
            shape,
            spec.experts,
            spec.rank,
            self._region.own,
            self._region.addresses,
            self._notice,
            int(spec.timeout * 1e9),
        )
        waiting = waiting_programs(_multiprocessors(spec.device), spec.ranks_per_gpu)
        self._pulled = PulledExchange(self._exchange, waiting)
        private = self._exchange.private_bytes + self._pulled.private_bytes
        self.buffer_bytes = self._region.own.nbytes + private
        self._slab_results = self._pulled.result_slab.view(spec.dtype)
        self._open = False
        """A dispatch was begun that was not combined."""
        self._results = self._exchange.results.view(spec.dtype).view(-1, spec.top_k, spec.hidden_size)
        self._row_dtype = ROW_DTYPES[spec.row_dtype]
        self._counted = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise what the device has found since: a rank that came too late, an id that no expert has.

        Costs one read of host memory. Rows of a step that failed mean nothing.

        Raises:
            EngineDeadError: names the rank and what it did not do in time.
            ContractError: a route that the contract forbids.
        """
        if self._read[0]:
            raise problem(self._read.tolist(), self.spec)

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        self.check()
        spec = self.spec
        capturing = torch.cuda.is_current_stream_capturing()
        masked = spec.layouts[phase] is Layout.MASKED
        if capturing and not masked:
            raise ContractError(
                f"contiguous rows ({phase.value}) cannot be captured: the host waits for their number"
            )
        ids, weights = ids.contiguous(), weights.contiguous()
        slab_rows = len(spec.experts) * spec.capacity[phase] if masked else 0
        if self._open and self._exchange.shape.few_tokens:
            self._pulled.settle()
        self._open = True
        if masked and self._exchange.shape.is_few(spec.capacity[phase]):
            x, scales = _copyable(hidden), _dense(scales)
            arrived = self._pulled.dispatch(x, scales, ids, weights, slab_rows)
            results = self._slab_results
            rows = masked_rows(self._exchange, arrived, slab_rows, self._row_dtype, results)
            return rows, _WayBack(ids, arrived, slab_rows)
        arrived = self._exchange.exchange_counts(ids, slab_rows, spec.alignment)
        if not masked:
            self._counted.record()
        self._exchange.send_rows(_copyable(hidden), _dense(scales), weights)
        if masked:
            return masked_rows(self._exchange, arrived, slab_rows, self._row_dtype), _WayBack(ids, arrived)
        self._counted.synchronize()
        self.check()
        total = _rehearsed(ids.numel(), spec.alignment) if rehearsing() else int(self._read[TOTAL])
        segments = contiguous_rows(self._exchange, arrived, total, spec.alignment, self._row_dtype)
        return segments, _WayBack(ids, arrived)

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        way: _WayBack = state
        spec = self.spec
        self.check()
        flat = rows.reshape(-1, spec.hidden_size).contiguous()
        self._open = False
        if way.few_slab_rows:
            return self._pulled.combine(flat, way.ids, way.arrived, way.few_slab_rows)
        self._exchange.return_rows(flat, way.arrived)
        return spec.kernels.sum_lanes(self._results[:num_tokens], way.ids, spec.dtype)

    def close(self) -> None:
        """Unmap everything. What peers have mapped stays theirs until they unmap it too."""
        if self._closed:
            return
        super().close()
        torch.cuda.synchronize(self.spec.device)
        del self._pulled, self._exchange, self._region, self._results, self._slab_results


def _indexed(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _rehearsed(lanes: int, alignment: int) -> int:
    """Rows of a dispatch that was only compiled: as many as when every rank sends and gets the same."""
    return -(-lanes // alignment) * alignment


def _copyable(hidden: torch.Tensor) -> torch.Tensor:
    """Rows that can be read 16 bytes at a time."""
    stride = hidden.stride(0) * hidden.element_size()
    if hidden.stride(-1) != 1 or stride % 16 or hidden.data_ptr() % 16:
        return hidden.contiguous()
    return hidden


def _dense(scales: torch.Tensor | None) -> torch.Tensor | None:
    return scales if scales is None or scales.stride(-1) == 1 else scales.contiguous()
