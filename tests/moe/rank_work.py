"""What each rank does in the multi-rank tests of MoE layers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from interlock.errors import EngineDeadError
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.layer import MoELayer
from interlock.moe.terms import Layout, Phase
from interlock.parallel.topology import Groups
from tests.moe.layers import Weights, build_layer, make_step
from tests.moe.oracle import make_card

HIDDEN = 48
STEPS = 6


def combinations(groups: Groups) -> list[dict[str, Any]]:
    """Every backend and layout that this world allows, with both runners."""
    plans = []
    for backend in a2a_backends().entries.values():
        if "cpu" not in backend.devices or (backend.requires_full_ep and groups.ep.size != groups.world.size):
            continue
        for layout in sorted(backend.layouts[Phase.DECODE]):
            for runner in ("torch", "cpu"):
                plans.append(
                    {
                        "moe_a2a_backend": backend.name,
                        "moe_runner_backend": runner,
                        "moe_layout_prefill": layout.value,
                        "moe_layout_decode": layout.value,
                    }
                )
    return plans


def sizes_of(groups: Groups) -> dict[str, int]:
    return {
        "tp_size": groups.world.size,
        "ep_size": groups.ep.size,
        "attn_dp_size": groups.attn_dp.size,
    }


def tokens_of(replica: int, step: int, seed: int) -> tuple[torch.Tensor, int]:
    """Hidden rows [n, h] of a replica and how many of them are live; padding is NaN."""
    pick = random.Random(f"{seed}/{replica}/{step}")
    live = pick.choice((0, 1, 2, 5, 7, 11))
    padded = live + pick.choice((0, 0, 3))
    generator = torch.Generator().manual_seed(pick.randrange(2**40))
    hidden = torch.randn(padded, HIDDEN, generator=generator)
    hidden[live:] = torch.nan
    return hidden, live


def equals_oracle(groups: Groups, kernels: str) -> int:
    """All combinations against the loop oracle, replicas of different sizes; returns how many steps ran."""
    weights = Weights(make_card(8, 3, routed_scaling_factor=1.5), HIDDEN)
    ran = 0
    for plan in combinations(groups):
        layer, context = build_layer(weights, groups=groups, kernels=kernels, **plan, **sizes_of(groups))
        for step in range(STEPS):
            hidden, live = tokens_of(groups.attn_dp.rank, step, 1)
            out = layer.forward(hidden, make_step(len(hidden), live, list(Phase)[step % 2]))
            assert out.shape == hidden.shape, (plan, out.shape)
            np.testing.assert_allclose(
                out[:live].numpy(), weights.expected(hidden[:live]), atol=3e-6, err_msg=f"{plan} {step}"
            )
            assert out[live:].eq(0).all(), (plan, step)
            ran += 1
        _check_receipt(layer, plan)
        context.close()
    return ran


def _check_receipt(layer: MoELayer, plan: dict[str, Any]) -> None:
    receipt = layer.observed()
    assert receipt["a2a_backend"] == plan["moe_a2a_backend"]
    assert receipt["layouts"] == {"prefill": plan["moe_layout_prefill"], "decode": plan["moe_layout_decode"]}
    assert receipt["dispatches"] == receipt["combines"] == {"prefill": STEPS // 2, "decode": STEPS // 2}


def equals_one_rank_bit_for_bit(groups: Groups) -> int:
    """Deterministic mode: every combination gives the bits of one process."""
    weights = Weights(make_card(8, 3), HIDDEN, seed=4)
    reference, alone = build_layer(weights, kernels="cpu", moe_runner_backend="cpu")
    compared = 0
    for plan in combinations(groups):
        if plan["moe_runner_backend"] != "cpu":
            continue
        layer, context = build_layer(
            weights, groups=groups, kernels="cpu", deterministic=True, **plan, **sizes_of(groups)
        )
        for step in range(STEPS):
            hidden, live = tokens_of(groups.attn_dp.rank, step, 2)
            hidden = hidden[:live]
            out = layer.forward(hidden, make_step(live))
            assert torch.equal(out, reference.forward(hidden, make_step(live))), (plan, step)
            companions = torch.cat([torch.randn(3, HIDDEN), hidden])
            beside = layer.forward(companions, make_step(live + 3))[3:]
            assert torch.equal(out, beside), (plan, step, "companions")
            compared += 1
        context.close()
    alone.close()
    return compared


def uneven_experts(groups: Groups) -> int:
    """6 experts on any number of ranks, and an expert width that the slices do not divide."""
    weights = Weights(make_card(6, 2, intermediate_size=13), HIDDEN, seed=9)
    for plan in combinations(groups):
        layer, context = build_layer(weights, groups=groups, **plan, **sizes_of(groups))
        hidden, live = tokens_of(groups.attn_dp.rank, 0, 3)
        out = layer.forward(hidden, make_step(len(hidden), live))
        np.testing.assert_allclose(out[:live].numpy(), weights.expected(hidden[:live]), atol=3e-6)
        context.close()
    return len(layer.local_experts)


def scaled_identity_layers(groups: Groups, repeats: int) -> int:
    """Ten layers back to back, factors 2, -1, 0.5 in turn: exactly -2 x (B28), and idle ranks in between."""
    factors = [(2.0, -1.0, 0.5)[layer % 3] for layer in range(10)]
    checked = 0
    for name, layout in (("shared_memory", Layout.MASKED), ("collective", Layout.CONTIGUOUS)):
        weights = Weights(make_card(4, 2), HIDDEN)
        _, context = build_layer(
            weights,
            groups=groups,
            moe_a2a_backend=name,
            moe_layout_prefill=layout.value,
            moe_layout_decode=layout.value,
            **sizes_of(groups),
        )
        dispatcher = context.dispatcher
        generator = torch.Generator().manual_seed(groups.world.rank)
        for repeat in range(repeats if name == "shared_memory" else repeats // 10):
            idle = (repeat + groups.world.rank) % groups.world.size == 0
            x = torch.randint(-8, 9, (0 if idle else 3, HIDDEN), generator=generator).float()
            ids = torch.rand(len(x), 4, generator=generator).argsort(dim=1)[:, :1]
            ids = torch.cat([ids, torch.full_like(ids, -1)], dim=1)
            y = x
            for factor in factors:
                sent = dispatcher.dispatch(y, ids, torch.ones(len(x), 2), Phase.DECODE)
                y = dispatcher.combine(sent.rows.rows * factor, sent.handle)
            product = torch.tensor(factors).prod()
            assert torch.equal(y, x * product), (name, repeat)
            checked += 1
        context.close()
    return checked


def late_rank(groups: Groups) -> str:
    """Rank 1 never dispatches: the other's error names it, after the time limit."""
    weights = Weights(make_card(4, 2), HIDDEN)
    layer, context = build_layer(
        weights,
        groups=groups,
        moe_a2a_backend="shared_memory",
        moe_layout_prefill="masked",
        moe_layout_decode="masked",
        stall_timeout=0.5,
        **sizes_of(groups),
    )
    message = ""
    if groups.world.rank == 0:
        try:
            layer.forward(torch.randn(2, HIDDEN), make_step(2))
        except EngineDeadError as error:
            message = str(error)
    groups.world.barrier()
    context.close()
    return message


def mapped_segments(groups: Groups) -> tuple[int, int]:
    """Shared segments mapped while a dispatcher lives, and after it is closed."""
    weights = Weights(make_card(4, 2), HIDDEN)
    _, context = build_layer(
        weights,
        groups=groups,
        moe_a2a_backend="shared_memory",
        moe_layout_prefill="contiguous",
        moe_layout_decode="masked",
        **sizes_of(groups),
    )
    during = _segments()
    groups.world.barrier()
    context.close()
    return during, _segments()


def _segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("interlock-a2a" in line for line in maps)
