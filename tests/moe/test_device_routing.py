"""The GPU's router against ``choose_experts``: on a GPU, or ``TRITON_INTERPRET=1 pytest`` on a CPU."""

from __future__ import annotations

import pytest
import torch

from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.device_routing import device_routing
from interlock.moe.routing import Router, choose_experts
from tests.moe.oracle import make_card

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.kernels.triton import router  # noqa: E402

HIDDEN = 640


def device() -> str:
    if triton.knobs.runtime.interpret:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1")


class GpuKernels(TorchKernels):
    name = "triton"


def routers(card, where: str, *, dtype: torch.dtype = torch.float32) -> tuple[Router, Router]:
    """The router of the GPU's kernel set and the plain one, with the same weights."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(card.num_experts, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(card.num_experts, generator=generator) * 0.1 if card.has_selection_bias else None
    both = []
    for kernels in (GpuKernels(), TorchKernels()):
        both.append(Router(card, HIDDEN, kernels, torch.device(where)))
        both[-1].load(weight, bias)
    return both[0], both[1]


@pytest.mark.gpu
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scoring", "biased", "normalise", "experts", "k"),
    [("sigmoid", True, True, 24, 8), ("softmax", False, True, 16, 3), ("softmax", False, False, 8, 8)],
)
def test_routes_equal_the_plain_router(
    monkeypatch, scoring, biased, normalise, experts, k, dtype, many
) -> None:
    where = device()
    card = make_card(
        experts,
        k,
        scoring=scoring,
        has_selection_bias=biased,
        normalise_top_k=normalise,
        routed_scaling_factor=2.5,
        router_dtype="float32" if dtype == torch.float32 else "bfloat16",
    )
    ours, plain = routers(card, where, dtype=dtype)
    hidden = torch.randn(13, HIDDEN, generator=torch.Generator().manual_seed(1)).to(where, torch.bfloat16)
    if many:
        monkeypatch.setattr(router, "FEW_TOKENS", 0)
    got, want = ours.route(hidden, 11), plain.route(hidden, 11)
    assert torch.equal(got.ids, want.ids)
    assert torch.allclose(got.weights, want.weights, rtol=1e-4, atol=1e-6)
    assert bool((got.ids[11:] == -1).all())
    assert bool((got.weights[11:] == 0).all())
    assert torch.allclose(ours.logits(hidden), plain.logits(hidden), rtol=1e-5, atol=2e-4)
    count = torch.tensor([4], dtype=torch.int32, device=where)
    counted = ours.route(hidden, 13, count)
    assert torch.equal(counted.ids[:4], got.ids[:4])
    assert bool((counted.ids[4:] == -1).all())
    assert bool((counted.weights[4:] == 0).all())


@pytest.mark.gpu
def test_choice_on_nasty_rows() -> None:
    where = device()
    card = make_card(12, 4, scoring="sigmoid", has_selection_bias=True)
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(8, 12, generator=torch.Generator().manual_seed(2))
    logits[0] = 0.0
    logits[1] = nan
    logits[2, 3] = nan
    logits[3] = -inf
    logits[3, 5] = 1.0
    logits[4] = -inf
    logits[5] = -300.0
    logits[6, :6] = 2.0
    bias = torch.zeros(12)
    bias[7] = 1e-3
    want = choose_experts(logits, bias, card)
    got = router.top_k(logits.to(where), bias.to(where), 4, sigmoid=True, normalise=True)
    assert torch.equal(got[0].cpu(), want.ids)
    assert torch.allclose(got[1].cpu(), want.weights, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("experts", "k"), [(256, 8), (384, 8), (12, 4), (8, 8), (5, 1)])
@pytest.mark.parametrize("kind", ["ties", "few", "nan"])
def test_choice_of_any_size_in_parts(scoring, experts, k, kind) -> None:
    where = device()
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(6, experts, generator=generator)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    some = torch.rand(6, experts, generator=generator)
    if kind == "few":
        logits = logits.masked_fill(some < 0.5, -float("inf"))
    if kind == "nan":
        logits = logits.masked_fill(some < 0.1, float("nan")) * 50
    sigmoid = scoring == "sigmoid"
    bias = (torch.randn(experts, generator=generator) * 0.5).round(decimals=1) if sigmoid else None
    want = choose_experts(logits, bias, make_card(experts, k, scoring=scoring, has_selection_bias=sigmoid))
    parts = torch.cat((logits, torch.zeros(6, 2 * experts)), 1).to(where)
    on_device = None if bias is None else bias.to(where)
    ids, weights = router.top_k(parts, on_device, k, sigmoid=sigmoid, normalise=True, parts=3)
    assert torch.equal(ids.cpu(), want.ids)
    assert torch.allclose(weights.cpu(), want.weights, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.gpu
def test_lanes_are_counted_onto_what_was_there() -> None:
    where = device()
    ids = torch.tensor([[0, 2, -1], [2, 3, -1], [0, 2, 3]] * 40, device=where)
    counts = torch.tensor([1, 0, 5, 0, 0], device=where)
    router.count_lanes(ids, counts)
    assert counts.tolist() == [81, 80, 5, 120, 80]


@pytest.mark.gpu
def test_parts_of_a_float32_weight_add_up_to_it() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    packed = router.pack_router(weight)
    assert packed.parts == 3
    blocks = packed.blocks.view(3, 5, 64).double()
    assert float((blocks.sum(0) - weight.double()).abs().max()) <= 2.0**-24 * float(weight.abs().max())
    assert router.pack_router(weight.to(torch.bfloat16)).parts == 1


def test_groups_of_experts_are_left_to_torch() -> None:
    card = make_card(16, 4, num_groups=4, top_k_groups=2)
    assert device_routing(GpuKernels(), card, torch.zeros(16, HIDDEN)) is None
    assert device_routing(TorchKernels(), make_card(16, 4), torch.zeros(16, HIDDEN)) is None
