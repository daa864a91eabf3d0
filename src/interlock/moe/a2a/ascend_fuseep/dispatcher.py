"""Dispatch and combine through torch_npu's ``npu_moe_distribute_dispatch`` and ``_combine``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.moe.a2a.ascend_fuseep import BACKEND, MAX_EXPERTS
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.checked import CheckedDispatcher, buffer_shape
from interlock.moe.a2a.contract import ContractError, DispatcherSpec
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput
from interlock.moe.a2a.torch_groups import process_group
from interlock.moe.layouts import Segments, aligned_segments, filled_rows
from interlock.moe.terms import Phase

FLAG = "--moe-a2a-backend ascend_fuseep"


@dataclass(frozen=True, slots=True)
class _WayBack:
    """live int64 [m], tokens that were sent; ids int32 and weights float32 [m, k]; what dispatch gave."""

    live: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    index: torch.Tensor
    received: int
    counts: torch.Tensor
    scales: torch.Tensor | None


class AscendFuseEp(CheckedDispatcher):
    """Backend ``ascend_fuseep``, over ``groups.ep``."""

    def __init__(self, spec: DispatcherSpec, declaration: A2ABackend = BACKEND) -> None:
        super().__init__(spec, declaration)
        if spec.num_experts > MAX_EXPERTS:
            raise ContractError(f"{declaration.name} exchanges at most {MAX_EXPERTS} experts")
        self._operators: Any = _load()
        self._group = self._group_name()
        self.buffer_bytes = declaration.buffer_bytes(buffer_shape(spec))

    def _group_name(self) -> str:
        """HCCL's name of the EP group."""
        group: Any = process_group(self.spec.groups.ep)
        name: str = group._get_backend(torch.device("npu")).get_hccl_comm_name(self.spec.rank)
        return name

    def _common(self, phase_tokens: int) -> dict[str, Any]:
        """Arguments that both operators take, the same on every rank."""
        spec = self.spec
        return {
            "group_ep": self._group,
            "ep_world_size": len(spec.experts),
            "ep_rank_id": spec.rank,
            "moe_expert_num": spec.num_experts,
            "global_bs": phase_tokens * len(spec.experts),
        }

    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        spec = self.spec
        used = ids >= 0
        live = used.any(1).nonzero().flatten()
        if not bool(used[live].all()):
            raise ContractError("a token with some unused lanes: the operators want all k experts of a token")
        rows, sent_ids, sent_weights = hidden[live], ids[live].to(torch.int32), weights[live].contiguous()
        if live.numel() == 0:  # the operators want a row of every rank
            rows = hidden.new_zeros(1, spec.hidden_size)
            sent_ids = torch.arange(spec.top_k, dtype=torch.int32, device=hidden.device).unsqueeze(0)
            sent_weights = weights.new_zeros(1, spec.top_k)
        expanded, _, index, counts, ep_counts, _, expert_scales = self._operators.npu_moe_distribute_dispatch(
            x=rows,
            expert_ids=sent_ids,
            expert_scales=sent_weights,
            quant_mode=0,
            expert_token_nums_type=1,
            **self._common(spec.capacity[phase]),
        )
        segments = aligned_segments(counts, spec.alignment)
        places = filled_rows(segments)
        way = _WayBack(
            live, sent_ids, sent_weights, places, index, expanded.shape[0], ep_counts, expert_scales
        )
        return self._lay_out(expanded, segments, places), (way, spec.capacity[phase])

    def _lay_out(self, expanded: torch.Tensor, segments: Segments, places: torch.Tensor) -> ContiguousRows:
        """The operators pack experts one behind the other; runners may want them aligned."""
        rows = expanded.new_empty(segments.rows, expanded.shape[1])
        rows[places] = expanded[: places.numel()]
        return ContiguousRows(
            rows=rows,
            psum=segments.psum.to(torch.int32),
            counts=segments.counts.to(torch.int32),
            alignment=self.spec.alignment,
            weights=None,
        )

    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        way: _WayBack
        way, tokens = state
        packed = rows.new_zeros(way.received, rows.shape[1])
        packed[: way.places.numel()] = rows[way.places]
        combined = self._operators.npu_moe_distribute_combine(
            expand_x=packed,
            expert_ids=way.ids,
            expand_idx=way.index,
            ep_send_counts=way.counts,
            expert_scales=way.weights,
            expand_scales=way.scales,
            **self._common(tokens),
        )
        home = rows.new_zeros(num_tokens, rows.shape[1])
        home[way.live] = combined[: way.live.numel()]
        return home


def _load() -> Any:
    try:
        library: Any = importlib.import_module("torch_npu")
    except Exception as error:  # without CANN its libraries do not load, in many words
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise StartupError(
            f"{FLAG}: torch_npu cannot be imported: {first}. Install torch-npu for this torch, and CANN"
        ) from error
    for name in ("npu_moe_distribute_dispatch", "npu_moe_distribute_combine"):
        if not hasattr(library, name):
            raise StartupError(f"{FLAG}: this torch_npu has no {name}: install a later torch-npu")
    return library
