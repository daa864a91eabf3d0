"""From the launch plan to the live dispatcher and runner: only here are declarations looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from interlock.errors import StartupError
from interlock.kernels.base import Kernels
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.contract import Dispatcher, DispatcherSpec
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.experts.registry import expert_runners
from interlock.moe.layer import MoEContext
from interlock.moe.meter import LoadMeter
from interlock.moe.overlap import TwoBatchOverlap, half_specs
from interlock.moe.placement import place
from interlock.moe.side_work import side_work
from interlock.moe.terms import Layout, Phase
from interlock.parallel.group import Group
from interlock.parallel.topology import Groups
from interlock.plan.launch_plan import LaunchPlan
from interlock.plugins import load_symbol


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's place among the ranks that share something."""

    size: int
    rank: int

    @staticmethod
    def of(group: Group) -> _Part:
        return _Part(size=group.size, rank=group.rank)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_moe_context(plan: LaunchPlan, groups: Groups, kernels: Kernels, device: torch.device) -> MoEContext:
    """Build what the MoE layers of this rank share. Collective: all ranks call it at the same point.

    The dispatcher allocates its buffers here, so this must come before the KV pools are allocated.

    Raises:
        StartupError: the plan asks for a combination that the declarations do not allow.
    """
    card = plan.card.experts
    if card is None:
        raise StartupError(f"{plan.card.architecture} has no routed experts, so there is nothing to dispatch")
    backend = a2a_backends().get(plan.moe_a2a_backend)
    runner = expert_runners().get(plan.moe_runner_backend)
    layouts = {
        Phase.PREFILL: Layout(plan.moe_layout_prefill),
        Phase.DECODE: Layout(plan.moe_layout_decode),
    }
    for phase, layout in layouts.items():
        if layout not in runner.layouts:
            raise StartupError(f"runner {runner.name} cannot compute {layout.value} rows ({phase.value})")
    holders, slices = _split_of_experts(plan, backend, groups)
    spec = DispatcherSpec(
        groups=groups,
        experts=place(card.num_experts, holders.size),
        rank=holders.rank,
        num_experts=card.num_experts,
        top_k=card.top_k,
        hidden_size=plan.card.hidden_size,
        row_dtype=plan.dtype,
        dtype=_DTYPES[plan.dtype],
        device=device,
        layouts=layouts,
        capacity={Phase.PREFILL: plan.moe_prefill_capacity, Phase.DECODE: plan.moe_decode_capacity},
        kernels=kernels,
        alignment=runner.alignment,
        deterministic=plan.deterministic,
        timeout=plan.stall_timeout,
        nodes=plan.nnodes,
        mode=plan.moe_a2a_mode,
        ranks_per_gpu=plan.ranks_per_gpu,
    )
    make: Callable[[DispatcherSpec], Dispatcher] = load_symbol(backend.dispatcher)
    overlap = _two_batches(make, spec) if plan.moe_overlap else None
    return MoEContext(
        groups=groups,
        kernels=kernels,
        device=device,
        dtype=spec.dtype,
        dispatcher=overlap.dispatchers[0] if overlap else make(spec),
        overlap=overlap,
        runner=runner,
        layouts=layouts,
        experts=spec.experts,
        rank=spec.rank,
        slices=slices.size,
        slice_rank=slices.rank,
        meter=LoadMeter(len(spec.local_experts), device, shares=_shares(layouts, groups)),
    )


def _two_batches(make: Callable[[DispatcherSpec], Dispatcher], spec: DispatcherSpec) -> TwoBatchOverlap:
    first, second = half_specs(spec)
    return TwoBatchOverlap((make(first), make(second)), side_work(spec.device))


def _shares(layouts: Mapping[Phase, Layout], groups: Groups) -> dict[Phase, int]:
    """Over how many ranks a replica's tokens are spread before each dispatches its own."""
    return {
        phase: 1 if layout is Layout.REPLICATED else groups.attn_tp.size for phase, layout in layouts.items()
    }


def _split_of_experts(plan: LaunchPlan, backend: A2ABackend, groups: Groups) -> tuple[_Part, _Part]:
    """(over which ranks whole experts are spread, over which ranks their width is cut).

    A sum over slices of the width has no order that is independent of the number of slices, so in
    deterministic mode experts stay whole and are spread over the world: the same bytes on each rank.
    """
    if plan.deterministic:
        return _Part.of(groups.world), _Part(size=1, rank=0)
    if backend.requires_full_ep and groups.experts_tp.size > 1:
        raise StartupError(
            f"{backend.name} needs different experts on every rank: "
            f"--ep-size {plan.tp_size}, not {plan.ep_size}"
        )
    return _Part.of(groups.ep), _Part.of(groups.experts_tp)
