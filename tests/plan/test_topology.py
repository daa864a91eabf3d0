"""Sizes that fit or not: reports A07, A11, B13 and D01."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.parallel.topology import partitions
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.nearest import read_flags
from interlock.plan.resolve import resolve
from tests.plan.machines import machine, mimo_card, tiny_card

TP, EP, DP = (1, 2, 4, 6), (1, 2, 3, 4, 8), (1, 2, 4)
FITS = {
    # tp: {ep: dp that fit}, by hand for 8 query heads, 2 and 4 kv heads, 8 experts of width 128
    1: {1: {1}},
    2: {1: {1, 2}, 2: {1, 2}},
    4: {1: {1, 2, 4}, 2: {1, 2, 4}, 4: {1, 2, 4}},
    6: {},  # 8 heads and 6, 3 ranks; width 128 and 6, 3 slices: only dp 6 and ep 2 would fit
}


def plan_for(**asked: object) -> LaunchPlan:
    return resolve(Options.of(model="m", **asked), tiny_card(), machine())


@pytest.mark.parametrize(("tp", "ep", "dp"), list(product(TP, EP, DP)))
def test_sizes_against_a_table_made_by_hand(tp: int, ep: int, dp: int) -> None:
    """A11: tp % ep, tp % dp, heads, experts and width are verified before anything is spawned; the message
    names the sizes; for each accepted case the EP groups cover each rank once."""
    if dp in FITS[tp].get(ep, set()):
        plan = plan_for(tp_size=tp, ep_size=ep, attn_dp_size=dp)
        groups = partitions(tp_size=plan.tp_size, attn_dp_size=dp, ep_size=ep)
        for ranks in groups.values():
            assert sorted(rank for group in ranks for rank in group) == list(range(tp))
        return
    with pytest.raises(Refusal) as caught:
        plan_for(tp_size=tp, ep_size=ep, attn_dp_size=dp)
    assert caught.value.option in ("--ep-size", "--attn-dp-size", "--tp-size")
    assert str(tp) in str(caught.value) or str(ep) in str(caught.value)
    assert caught.value.alternatives


@pytest.mark.parametrize("ep", [3, 5, 6])
def test_experts_that_do_not_divide_are_refused(ep: int) -> None:
    """B13: 8 experts over 3, 5 or 6 ranks: a clear refusal instead of two formulas that disagree."""
    with pytest.raises(Refusal, match="8 experts cannot be shared out evenly") as caught:
        plan_for(tp_size=ep, ep_size=ep, attn_dp_size=ep)
    assert caught.value.option == "--ep-size"


def test_a_request_of_64_over_4_replicas_is_never_divided() -> None:
    """A07: chunk and running requests are for each replica, as documented, and never divided."""
    plan = plan_for(tp_size=4, attn_dp_size=4, chunked_prefill_size=64, max_running_requests=6, page_size=32)
    assert (plan.chunked_prefill_size, plan.max_running_requests) == (64, 6)
    from interlock.plan.explain import capacities

    rows = {name: value for name, value, _ in capacities(plan)}
    assert rows["running requests"] == "6"
    assert rows["running requests in all"] == "24"


def test_a_chunk_below_a_page_is_refused() -> None:
    """A07: a value below a page is refused, with sizes that work."""
    with pytest.raises(Refusal, match="at least one page of 32") as caught:
        plan_for(chunked_prefill_size=16, page_size=32)
    assert caught.value.alternatives[0] == "--chunked-prefill-size 32"


@pytest.mark.parametrize("tp", [1, 2, 4, 5, 8])
def test_expert_width_320_by_tp(tp: int) -> None:
    """D01: width 320 in blocks of 128 over tp ranks. Weights are dequantised before they are sliced, so every
    tp that divides 320 is exact; with a runner that keeps blocks the refusal names width and slices."""
    card = tiny_card(weight_format="fp8_block", dtype="bfloat16")
    assert card.experts is not None
    card = msgspec.structs.replace(card, experts=msgspec.structs.replace(card.experts, intermediate_size=320))
    plan = resolve(Options.of(model="m", tp_size=tp, ep_size=1, attn_dp_size=tp), card, machine())
    assert plan.experts_tp_size == tp

    from interlock.plan.topology import experts_problem

    problem = experts_problem(card, tp, 1, sliced_block=128)
    assert (problem is None) == (tp == 1)
    assert problem is None or ("320" in problem and f"= {tp} ranks" in problem)


def test_kv_heads_are_copied_when_ranks_outnumber_them() -> None:
    plan = plan_for(tp_size=8)
    assert plan.attn_tp_size == 8
    assert plan.attn_dp_size == 1


def test_attention_replicas_follow_from_heads_that_do_not_fit() -> None:
    """9 query heads on 2 ranks: two replicas, and the reason says so."""
    card = tiny_card()
    attention = msgspec.structs.replace(card.layers[0].attention, num_heads=9, num_kv_heads=3)
    layers = tuple(msgspec.structs.replace(layer, attention=attention) for layer in card.layers)
    plan = resolve(Options.of(model="m", tp_size=2), tiny_card(layers=layers), machine())
    assert plan.attn_dp_size == 2
    assert "9 attention heads" in plan.provenance["attn_dp_size"].reason


def test_without_exchange_experts_are_sliced_and_else_whole() -> None:
    assert plan_for(tp_size=4).ep_size == 1
    assert plan_for(tp_size=4, moe_a2a_backend="collective").ep_size == 4
    assert plan_for(tp_size=4, deterministic=True).ep_size == 4
    odd = resolve(Options.of(model="m", tp_size=3, attn_dp_size=3), tiny_card(experts=wide()), machine())
    assert odd.ep_size == 3
    assert "cannot be sliced" in odd.provenance["ep_size"].reason


def wide() -> object:
    experts = tiny_card().experts
    assert experts is not None
    return msgspec.structs.replace(experts, num_experts=9, intermediate_size=128)


def test_a_backend_that_would_be_inert_is_refused() -> None:
    """A01: one expert-parallel rank of four exchanges nothing."""
    with pytest.raises(Refusal, match="ep-size") as caught:
        plan_for(tp_size=4, ep_size=1, moe_a2a_backend="collective")
    assert caught.value.alternatives == ("--ep-size 4",)


@pytest.mark.parametrize("ep", [1, 2])
def test_deterministic_refuses_a_given_ep_size_below_tp(ep: int) -> None:
    with pytest.raises(Refusal, match="whole experts") as caught:
        plan_for(tp_size=4, ep_size=ep, deterministic=True)
    assert caught.value.alternatives == ("--ep-size 4",)


@pytest.mark.parametrize(
    ("asked", "option", "words"),
    [
        ({"tp_size": 4, "nnodes": 3, "dist_init": "a:1"}, "--nnodes", "evenly"),
        ({"tp_size": 4, "nnodes": 2}, "--dist-init", "host:port"),
        ({"tp_size": 4, "nnodes": 2, "dist_init": "a"}, "--dist-init", "host:port"),
        ({"tp_size": 4, "nnodes": 2, "dist_init": "a:99999"}, "--dist-init", "host:port"),
        ({"node_rank": 1}, "--node-rank", "numbered 0 to 0"),
    ],
)
def test_nodes(asked: dict[str, object], option: str, words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        plan_for(**asked)
    assert caught.value.option == option
    alternative = read_flags(caught.value.alternatives[0])
    resolve(Options.of(model="m", **asked).changed(alternative), tiny_card(), machine())


def test_user_values_name_their_flag_and_rules_their_reason() -> None:
    plan = plan_for(tp_size=4, moe_a2a_backend="collective")
    assert plan.provenance["tp_size"].source is Source.USER
    assert plan.provenance["ep_size"].source is Source.RULE
    assert plan.provenance["max_model_len"].source is Source.MODEL
    assert plan.provenance["page_size"].source is Source.DEFAULT


def test_refusals_of_mimo_offer_sizes_that_plan() -> None:
    """Flash has 4 kv heads in full layers: attention TP 3 does not exist; the offer does."""
    card = mimo_card()
    options = Options.of(model="m", tp_size=6, attn_dp_size=2, kv_memory="1GiB")
    facts = machine(memory_total=2 << 40, memory_available=2 << 40)
    with pytest.raises(Refusal) as caught:
        resolve(options, card, facts)
    assert caught.value.alternatives
    resolve(options.changed(read_flags(caught.value.alternatives[0])), card, facts)
