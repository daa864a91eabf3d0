"""Dispatch and combine through Mooncake EP.

The library marks a rank inactive that misses the time limit, and goes on. The step's answers would lack its
experts, so that is an error here, which names the rank.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from interlock.errors import EngineDeadError, StartupError
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.checked import CheckedDispatcher
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.low_latency import gather_routes, row_weights
from interlock.moe.a2a.low_latency_sizes import library_capacity
from interlock.moe.a2a.mooncake import BACKEND, PACKAGE, region_bytes
from interlock.moe.a2a.rows import ExpertInput, MaskedRows
from interlock.moe.a2a.torch_groups import process_group, refuse_capture
from interlock.moe.terms import Phase

FLAG = "--moe-a2a-backend mooncake"


@dataclass(frozen=True, slots=True)
class _WayBack:
    ids: torch.Tensor
    handle: Any


class MooncakeEp(CheckedDispatcher):
    """Backend ``mooncake``, over ``groups.ep``. Building it is collective."""

    def __init__(self, spec: DispatcherSpec, declaration: A2ABackend = BACKEND) -> None:
        super().__init__(spec, declaration)
        refuse_capture(FLAG, spec.device)
        self._tokens = library_capacity(max(spec.capacity.values()))
        self._active = torch.ones(len(spec.experts), dtype=torch.int32, device=spec.device)
        self._timeout = int(spec.timeout * 1e6)
        self._buffer: Any = self._open(_load())

    def _open(self, library: Any) -> Any:
        spec = self.spec
        ranks = len(spec.experts)
        planned = region_bytes(self._tokens, spec.hidden_size, spec.num_experts)
        wanted = library.Buffer.get_ep_buffer_size_hint(
            self._tokens, spec.hidden_size, ranks, spec.num_experts
        )
        if wanted > planned:
            raise StartupError(f"{FLAG}: the plan reserves {planned} bytes, and the library wants {wanted}")
        self.buffer_bytes = wanted
        return library.Buffer(process_group(spec.groups.ep), wanted)

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        spec, ids = self.spec, ids.contiguous()
        rows, counts, handle, _, _ = self._buffer.dispatch(
            hidden.contiguous(),
            ids,
            self._active,
            self._tokens,
            spec.num_experts,
            self._timeout,
            use_fp8=False,
        )
        self._refuse_silence("dispatch")
        routes = gather_routes(spec.groups.ep, ids, weights, self._tokens)
        found = row_weights(handle[1], handle[0], *routes, spec.local_experts.start)
        return MaskedRows(rows=rows, counts=counts, weights=found), _WayBack(ids, handle)

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        way: _WayBack = state
        ones = torch.ones(way.ids.shape, device=rows.device)
        combined, _, _ = self._buffer.combine(
            rows.contiguous(), way.ids, ones, self._active, self._timeout, way.handle
        )
        self._refuse_silence("combine")
        home: torch.Tensor = combined
        return home

    def _refuse_silence(self, what: str) -> None:
        silent = (self._active == 0).nonzero().flatten().tolist()
        if silent:
            raise EngineDeadError(
                f"expert-parallel ranks {silent} did not reach the {what} within {self.spec.timeout:g} s"
            )


def _load() -> Any:
    try:
        return importlib.import_module("mooncake.mooncake_ep_buffer")
    except Exception as error:  # a native module that does not load says so in many ways
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise StartupError(
            f"{FLAG}: mooncake_ep_buffer cannot be imported: {first}. Install {PACKAGE} for this CUDA and "
            "Python, with the RDMA libraries (libibverbs) that it links to"
        ) from error
