"""Routers against the loop oracle, and the routing faults that other engines reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import CheckpointError
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.contract import ContractError
from interlock.moe.layouts import count_lanes
from interlock.moe.routing import Router, choose_experts, scaled_weights, validate_routes
from interlock.plan.card import ExpertsCard
from tests.moe import oracle
from tests.moe.oracle import make_card

SIZES = [(8, 2), (128, 8), (256, 8), (384, 8), (896, 16)]


def assert_equal_oracle(logits: torch.Tensor, bias: torch.Tensor | None, card: ExpertsCard) -> None:
    routes = choose_experts(logits, bias, card)
    ids, weights = oracle.route(logits.numpy(), None if bias is None else bias.numpy(), card)
    np.testing.assert_array_equal(routes.ids.numpy(), ids)
    np.testing.assert_allclose(routes.weights.numpy(), weights, rtol=2e-6, atol=1e-30)


def plain_router(card: ExpertsCard, hidden_size: int) -> Router:
    return Router(card, hidden_size, get_kernels("torch", threads=1), torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.sampled_from([(8, 2, 1, 1), (8, 8, 1, 1), (24, 12, 1, 1), (16, 4, 4, 2), (32, 3, 8, 1)]),
    scoring=st.sampled_from(["sigmoid", "softmax"]),
    normalise=st.booleans(),
    with_bias=st.booleans(),
    tied=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_equals_loop_oracle(
    seed: int,
    sizes: tuple[int, int, int, int],
    scoring: str,
    normalise: bool,
    with_bias: bool,
    tied: bool,
    scale: float,
) -> None:
    experts, top_k, groups, top_k_groups = sizes
    card = make_card(
        experts,
        min(top_k, experts // groups * top_k_groups),
        scoring=scoring,
        normalise_top_k=normalise,
        has_selection_bias=with_bias,
        num_groups=groups,
        top_k_groups=top_k_groups,
        routed_scaling_factor=scale,
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(17, experts, generator=generator) * 3
    if tied:
        logits = logits.round()
    bias = torch.randint(-2, 3, (experts,), generator=generator).float() if with_bias else None
    assert_equal_oracle(logits, bias, card)


def test_bias_stays_float32() -> None:
    """C01: 256 biases that differ in the third decimal decide the choice; bf16 would leave a few values."""
    card = make_card(256, 8)
    bias = torch.linspace(6.817, 7.063, 256)
    logits = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    assert bias.bfloat16().unique().numel() <= 9
    assert_equal_oracle(logits, bias, card)
    rounded = choose_experts(logits, bias.bfloat16().float(), card)
    assert not torch.equal(rounded.ids, choose_experts(logits, bias, card).ids)


def test_loaded_bias_is_float32_in_a_bfloat16_model() -> None:
    """C01: the parameter is never created in the model's dtype."""
    router = plain_router(make_card(4, 2, router_dtype="bfloat16"), 8)
    bias = torch.linspace(6.817, 7.063, 4)
    router.load(torch.randn(4, 8).bfloat16(), bias)
    assert router.bias is not None
    assert router.bias.dtype == torch.float32
    assert torch.equal(router.bias, bias)


def test_bias_moves_the_choice_not_the_weights() -> None:
    """C03: scores .9 .2 .1 .05 with bias 5 on the third: experts 0 and 2, weights .9 and .1."""
    card = make_card(4, 2, normalise_top_k=False)
    logits = torch.logit(torch.tensor([[0.9, 0.2, 0.1, 0.05]]))
    routes = choose_experts(logits, torch.tensor([0.0, 0.0, 5.0, 0.0]), card)
    assert routes.ids.tolist() == [[0, 2]]
    torch.testing.assert_close(routes.weights, torch.tensor([[0.9, 0.1]]))


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_bias_moves_the_choice_for_every_size(experts: int, top_k: int) -> None:
    """C03: for the sizes of released models."""
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(33, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 5
    assert_equal_oracle(logits, bias, make_card(experts, top_k, normalise_top_k=False))


@pytest.mark.parametrize("rows", [1, 64])
def test_all_scores_below_zero(rows: int) -> None:
    """C04: with a bias of -30 everywhere the two best are still the two best."""
    routes = choose_experts(torch.arange(8.0).repeat(rows, 1), torch.full((8,), -30.0), make_card(8, 2))
    assert routes.ids.tolist() == [[6, 7]] * rows


@pytest.mark.parametrize("rows", [1, 64])
def test_softmax_of_very_negative_logits(rows: int) -> None:
    """C04: logits between -90 and -80."""
    logits = -80 - 10 * torch.rand(rows, 8, generator=torch.Generator().manual_seed(1))
    assert_equal_oracle(logits, None, make_card(8, 2, scoring="softmax", has_selection_bias=False))


def test_rejected_groups_never_win() -> None:
    """C05: all biased scores are negative; only the best group's experts may be chosen."""
    card = make_card(8, 2, num_groups=4, top_k_groups=1, normalise_top_k=False)
    wanted = torch.tensor([-3.0, -4.0, -3.5, -5.0, -1.0, -2.0, -6.0, -3.2])
    routes = choose_experts(torch.zeros(1, 8), wanted - 0.5, card)
    assert routes.ids.tolist() == [[4, 5]]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_too_few_candidates_leave_slots_unused(scoring: str) -> None:
    """C07: two valid experts for four slots: the others are -1 with weight 0, and nothing is NaN."""
    card = make_card(8, 4, scoring=scoring, has_selection_bias=False)
    logits = torch.full((2, 8), -torch.inf)
    logits[:, 1], logits[:, 6] = 0.5, -0.25
    routes = choose_experts(logits, None, card)
    assert routes.ids.tolist() == [[1, 6, -1, -1]] * 2
    assert routes.weights[:, 2:].eq(0).all()
    torch.testing.assert_close(routes.weights.sum(dim=1), torch.ones(2))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_scaling_factor_is_applied_once(scale: float, normalise: bool) -> None:
    """C08: the router owns the factor: the weights sum to it, or to it times the sum of the scores."""
    card = make_card(8, 3, routed_scaling_factor=scale, normalise_top_k=normalise)
    chosen = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    total = scaled_weights(chosen, card).sum(dim=1)
    torch.testing.assert_close(total, torch.full((5,), scale) if normalise else scale * chosen.sum(dim=1))


def test_router_logits_are_float32() -> None:
    """C09: a float32 gate chooses as a float64 reference does in 2,000 rows; bf16 logits are refused."""
    card = make_card(384, 8, has_selection_bias=False)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(384, 256, generator=generator) / 16
    hidden = torch.randn(2000, 256, generator=generator)
    router = plain_router(card, 256)
    router.load(weight, None)
    exact = (hidden.double() @ weight.double().T).float()
    reference = choose_experts(exact, None, card).ids
    same = (router.route(hidden, 2000).ids == reference).all(dim=1).float().mean()
    assert same >= 0.999
    coarse = choose_experts(exact.bfloat16().float(), None, card).ids
    assert (coarse == reference).all(dim=1).float().mean() < same
    with pytest.raises(TypeError, match="float32"):
        choose_experts(exact.bfloat16(), None, card)


@pytest.mark.parametrize("experts", [6, 384, 896])
def test_no_padded_expert_is_chosen(experts: int) -> None:
    """C10: logits of -4 everywhere, sizes that are no power of two: ids stay below E."""
    routes = choose_experts(torch.full((9, experts), -4.0), torch.zeros(experts), make_card(experts, 4))
    assert routes.ids.tolist() == [[0, 1, 2, 3]] * 9


def test_unused_slots_are_not_counted() -> None:
    """C11, I04: statistics of [[0, unused], [unused, 2]] have E columns and sum to 2."""
    counts = count_lanes(torch.tensor([[0, -1], [-1, 2]]), 3)
    assert counts.tolist() == [1, 0, 1]


def test_padding_rows_have_no_route() -> None:
    """B05, I04: 5 live tokens in 8 rows give 10 routes."""
    card = make_card(8, 2, has_selection_bias=False)
    router = plain_router(card, 4)
    router.load(torch.randn(8, 4), None)
    routes = router.route(torch.randn(8, 4), 5)
    assert routes.ids[5:].eq(-1).all()
    assert routes.weights[5:].eq(0).all()
    assert int(count_lanes(routes.ids, 8).sum()) == 10


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_row_of_nan_disturbs_no_other_row(scoring: str) -> None:
    card = make_card(24, 6, scoring=scoring, has_selection_bias=False)
    logits = torch.randn(7, 24, generator=torch.Generator().manual_seed(0))
    clean = choose_experts(logits, None, card)
    logits[3] = torch.nan
    logits[5, 2] = torch.nan
    routes = choose_experts(logits, None, card)
    validate_routes(routes.ids, 24)
    assert routes.ids.min() >= 0
    others = [0, 1, 2, 4, 6]
    assert torch.equal(routes.ids[others], clean.ids[others])
    assert torch.equal(routes.weights[others], clean.weights[others])


@pytest.mark.parametrize(("experts", "top_k"), [(24, 12), (13, 3), (256, 8)])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_bits_do_not_depend_on_companions(experts: int, top_k: int, scoring: str) -> None:
    """B21: one token's ids and weights are the same bits alone and in any batch, at any place."""
    card = make_card(experts, top_k, scoring=scoring, has_selection_bias=False)
    generator = torch.Generator().manual_seed(9)
    token = torch.randn(1, experts, generator=generator)
    alone = choose_experts(token, None, card)
    for size in (2, 7, 64):
        for place in {0, size // 2, size - 1}:
            batch = torch.randn(size, experts, generator=generator)
            batch[place] = token
            routes = choose_experts(batch, None, card)
            assert torch.equal(routes.ids[place], alone.ids[0])
            assert torch.equal(routes.weights[place], alone.weights[0])


def test_ids_are_distinct_in_many_random_rows() -> None:
    """B12: ten thousand rows, with ties, never name an expert twice."""
    for scoring in ("sigmoid", "softmax"):
        card = make_card(16, 6, scoring=scoring, has_selection_bias=False)
        logits = torch.randn(10_000, 16, generator=torch.Generator().manual_seed(2)).round()
        ids = choose_experts(logits, None, card).ids
        assert (ids[:, 1:] > ids[:, :-1]).all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[4, 4], [2, 5]], "token 0 names expert 4 twice"),
        ([[1, 2], [8, 3]], "token 1 names expert 8"),
        ([[1, 2], [3, -2]], "token 1 names expert -2"),
    ],
)
def test_wrong_ids_are_named(ids: list[list[int]], message: str) -> None:
    """B09, B12: in debug mode an id out of range or twice in a row is an error that names the token."""
    with pytest.raises(ContractError, match=message):
        validate_routes(torch.tensor(ids), 8)
    validate_routes(torch.tensor([[3, -1], [-1, -1], [7, 0]]), 8)


def test_empty_batch() -> None:
    router = plain_router(make_card(8, 2, has_selection_bias=False), 4)
    router.load(torch.randn(8, 4), None)
    routes = router.route(torch.empty(0, 4), 0)
    assert routes.ids.shape == (0, 2)
    assert routes.ids.dtype == torch.int64
    assert routes.weights.shape == (0, 2)


def test_wrong_router_tensors_are_refused() -> None:
    router = plain_router(make_card(8, 2), 4)
    with pytest.raises(CheckpointError, match=r"router weight is \(4, 8\)"):
        router.load(torch.randn(4, 8), torch.zeros(8))
    with pytest.raises(CheckpointError, match="router bias"):
        router.load(torch.randn(8, 4), None)
