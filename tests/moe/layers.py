"""Small MoE layers for tests: random or identity experts, and the step that a forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from interlock.kernels.registry import get_kernels
from interlock.moe.build import build_moe_context
from interlock.moe.layer import MoEContext, MoELayer
from interlock.moe.terms import Phase
from interlock.parallel.topology import Groups
from interlock.plan.card import AttentionCard, ExpertsCard, LayerCard, ModelCard
from interlock.step import Step
from tests.moe import oracle
from tests.plans import make_plan


def make_model_card(experts: ExpertsCard, hidden_size: int, layers: int = 1) -> ModelCard:
    attention = AttentionCard(
        num_heads=2, num_kv_heads=1, head_dim=8, v_head_dim=8, rope_theta=1e4, rotary_dim=8
    )
    return ModelCard(
        family="test",
        architecture="Test",
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=32,
        layers=tuple(LayerCard(attention=attention, is_moe=True) for _ in range(layers)),
        experts=experts,
        norm_eps=1e-6,
        max_position=256,
        tie_word_embeddings=False,
        dtype="float32",
        weight_format="float32",
    )


def make_step(tokens: int, live: int | None = None, phase: Phase = Phase.DECODE) -> Step:
    """A step of which only phase and token counts matter to an MoE layer."""
    index = torch.arange(tokens)
    return Step(
        phase=phase,
        token_ids=index,
        positions=index,
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        kv_len=torch.tensor([tokens], dtype=torch.int32),
        full=None,
        window=None,
        sample_rows=index,
        live_tokens=tokens if live is None else live,
    )


@dataclass
class Weights:
    """Seeded weights of one layer, the same on every rank."""

    card: ExpertsCard
    hidden_size: int
    seed: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        count, width, hidden = self.card.num_experts, self.card.intermediate_size, self.hidden_size

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        self.tensors = {
            "router": random(count, hidden) * 2,
            "bias": torch.randn(count, generator=generator) * 0.1,
            "gate": random(count, width, hidden),
            "up": random(count, width, hidden),
            "down": random(count, hidden, width),
        }

    def load_into(self, layer: MoELayer) -> None:
        t = self.tensors
        layer.load_router(t["router"], t["bias"] if self.card.has_selection_bias else None)
        for expert in layer.local_experts:
            layer.load_expert(expert, t["gate"][expert], t["up"][expert], t["down"][expert])
        layer.finish_loading()

    def expected(self, hidden: torch.Tensor) -> np.ndarray:
        """The loop oracle's output for float32 hidden rows."""
        t = {name: tensor.double().numpy() for name, tensor in self.tensors.items()}
        logits = (hidden.double().numpy() @ t["router"].T).astype(np.float32)
        bias = t["bias"] if self.card.has_selection_bias else None
        ids, weights = oracle.route(logits, bias, self.card)
        return oracle.moe(hidden.double().numpy(), ids, weights, t["gate"], t["up"], t["down"])


def build_layer(
    weights: Weights,
    *,
    groups: Groups | None = None,
    kernels: str = "torch",
    device: str = "cpu",
    **plan: Any,
) -> tuple[MoELayer, MoEContext]:
    """A loaded layer in a context built from a plan with ``plan`` overrides."""
    card = make_model_card(weights.card, weights.hidden_size)
    launch = make_plan(card, kernels=kernels, **plan)
    context = build_moe_context(
        launch, groups or Groups.single(), get_kernels(kernels, threads=1), torch.device(device)
    )
    layer = MoELayer(weights.card, weights.hidden_size, 0, context)
    weights.load_into(layer)
    return layer, context
