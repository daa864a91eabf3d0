"""Who holds the experts, how tokens reach them, and what computes them: decided in order of dependence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.experts.base import ExpertRunner
from interlock.options import Options
from interlock.plan.a2a_mode import decide_a2a_mode
from interlock.plan.capacity import refuse_capacity_without_experts
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided
from interlock.plan.join import Declarations, Situation, exchanges
from interlock.plan.moe import Experts, check_a2a, decide_a2a, decide_experts
from interlock.plan.topology import World, decide_ep
from interlock.plan.weight_format import FP8, decide_expert_format


@dataclass(frozen=True, slots=True)
class ExpertParallelism:
    """``runner``: None where the model has no experts. ``ep``: ranks that experts are spread over."""

    a2a: Decided[str]
    mode: Decided[str]
    experts: Experts
    weight_format: Decided[str]
    ep: Decided[int]
    backend: A2ABackend
    runner: ExpertRunner | None

    @property
    def exchanges(self) -> bool:
        """Whether tokens travel between ranks."""
        return exchanges(self.backend)

    def items(self) -> dict[str, Decided[Any]]:
        """Plan items."""
        prefill, decode = self.experts.layout_prefill, self.experts.layout_decode
        return {
            "ep_size": self.ep,
            "moe_a2a_backend": self.a2a,
            "moe_a2a_mode": self.mode,
            "moe_runner_backend": self.experts.runner,
            "moe_layout_prefill": Decided(prefill.value.value, prefill.source, prefill.reason),
            "moe_layout_decode": Decided(decode.value.value, decode.source, decode.reason),
            "expert_weight_format": self.weight_format,
        }


def decide_expert_parallelism(
    options: Options, card: ModelCard, declared: Declarations, here: Situation, world: World
) -> ExpertParallelism:
    """Backend, runner, weight format and EP size.

    Raises:
        Refusal: the first that does not go with the model, the machine or another of them.
    """
    tp = world.tp_size.value
    a2a, backend = decide_a2a(options, card, declared, here, tp)
    mode = decide_a2a_mode(options, backend, declared.a2a, world.nnodes.value)
    experts = decide_experts(options, card, backend, declared, here)
    runner = declared.runners.get(experts.runner.value)
    weight_format = decide_expert_format(options, card, runner, here.dtype)
    ep = decide_ep(
        options,
        card,
        tp,
        exchanges=exchanges(backend),
        full_ep=exchanges(backend) and backend.requires_full_ep,
        sliced_block=max(card.weight_block) if weight_format.value == FP8 else 1,
    )
    check_a2a(backend, card, declared, here.with_ep_size(ep.value))
    if card.experts is None:
        refuse_capacity_without_experts(options)
    return ExpertParallelism(a2a, mode, experts, weight_format, ep, backend, runner)
