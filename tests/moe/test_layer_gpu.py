"""A whole MoE layer of the engine on a CUDA device: captured, replayed with other tokens and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interlock.errors import StartupError
from interlock.moe.experts.registry import expert_runners
from interlock.moe.layer import MoELayer
from tests.kernels.triton_cases import reference_lanes, relative
from tests.moe.layers import Weights, build_layer, make_step
from tests.moe.oracle import make_card

pytestmark = pytest.mark.gpu
HIDDEN, WIDTH, EXPERTS, K, TOKENS = 512, 256, 16, 4, 24
BF16 = torch.bfloat16


def gpu_layer(runner: str, scoring: str) -> MoELayer:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton", reason="the GPU kernels are written in Triton")
    card = make_card(
        EXPERTS, K, intermediate_size=WIDTH, scoring=scoring, has_selection_bias=scoring == "sigmoid"
    )
    try:
        layer, _ = build_layer(
            Weights(card, HIDDEN),
            kernels="triton",
            device="cuda",
            dtype="bfloat16",
            moe_a2a_backend="none",
            moe_runner_backend=runner,
            moe_layout_prefill="replicated",
            moe_layout_decode="replicated",
            moe_decode_capacity=64,
        )
    except StartupError as problem:
        pytest.skip(str(problem))
    return layer


def expected(layer: MoELayer, hidden: torch.Tensor) -> torch.Tensor:
    """Float64 emulation of the experts on the routes that the layer takes."""
    routes = layer._router.route(hidden, len(hidden))
    rounds = expert_runners().get(layer.runner_name).rounds_gate_up
    tensors = layer._runner._tensors
    return reference_lanes(hidden, routes.ids, routes.weights, tensors, rounds_gate_up=rounds).sum(1)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("runner", ["triton", "triton_fp8", "deep_gemm", "fastest_fp8"])
def test_a_captured_layer_is_replayed_with_other_tokens_and_padding(runner, scoring) -> None:
    layer = gpu_layer(runner, scoring)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    count = torch.full((1,), TOKENS, dtype=torch.int32, device="cuda")
    step = replace(make_step(TOKENS), live_count=count)
    layer.forward(hidden, step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.forward(hidden, step)
    for live in (TOKENS, 1, 17, 0):
        generator = torch.Generator("cuda").manual_seed(live)
        hidden.copy_(torch.randn(hidden.shape, device="cuda", generator=generator))
        hidden[live:] = float("nan")
        count.fill_(live)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((out[live:] == 0).all())
        if live:
            assert relative(out[:live], expected(layer, hidden[:live])) < 1e-2
            eager = layer.forward(hidden[:live].clone(), make_step(live))
            assert relative(out[:live], eager) < 1e-2


@pytest.mark.parametrize("runner", ["triton_fp8", "fastest_fp8"])
def test_nothing_waits_for_the_host(runner) -> None:
    layer = gpu_layer(runner, "sigmoid")
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    step = make_step(TOKENS)
    layer.forward(hidden, step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.forward(hidden, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
