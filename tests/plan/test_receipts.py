"""Receipts against the plan: report A01, and every item accounted for."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

from interlock.options import OPTIONS, Options
from interlock.plan.explain import explain_receipts, observed_text
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.receipts import LAYER_RULES, RULES, Where, check, option_of
from interlock.plan.resolve import resolve
from tests.plan.machines import dense_card, machine, tiny_card

PLAN = resolve(
    Options.of(
        model="m", tp_size=4, attn_dp_size=2, moe_a2a_backend="collective", disaggregation_mode="prefill"
    ),
    tiny_card(),
    machine(),
)


def honest(plan: LaunchPlan) -> dict[int, dict[str, Any]]:
    """What an engine shows that built exactly the plan."""
    receipts: dict[int, dict[str, Any]] = {}
    for rank in range(plan.tp_size):
        items: dict[str, Any] = {
            item: getattr(plan, item) for item, rule in RULES.items() if rule.where is Where.RANK
        }
        items["node_rank"] = rank // (plan.tp_size // plan.nnodes)
        if rank % plan.attn_tp_size == 0:
            items |= {item: getattr(plan, item) for item, rule in RULES.items() if rule.where is Where.LEADER}
        items["moe_layers"] = [
            {
                "layer": index,
                "a2a_backend": plan.moe_a2a_backend,
                "runner_backend": plan.moe_runner_backend,
                "layouts": {"prefill": plan.moe_layout_prefill, "decode": plan.moe_layout_decode},
                "capacity": {"prefill": plan.moe_prefill_capacity, "decode": plan.moe_decode_capacity},
                "dispatches": {"prefill": 1, "decode": 2},
                "combines": {"prefill": 1, "decode": 2},
                "dtype": plan.dtype,
                "weight_format": plan.expert_weight_format,
                "overlapped": plan.moe_overlap,
            }
            for index, layer in enumerate(plan.card.layers)
            if layer.is_moe
        ]
        receipts[rank] = items
    return receipts


def test_an_honest_engine_agrees() -> None:
    assert check(PLAN, honest(PLAN)) == []


def test_every_plan_item_has_a_rule_and_every_exception_a_reason() -> None:
    assert set(RULES) == set(LaunchPlan.__struct_fields__)
    for item, rule in RULES.items():
        assert (rule.where is Where.NOWHERE) == bool(rule.reason), item


@pytest.mark.parametrize("item", [item for item, rule in RULES.items() if rule.where is Where.RANK])
def test_each_rank_must_show_each_item(item: str) -> None:
    if item in ("qkv_layout", "nccl_library", "moe_a2a_mode"):
        pytest.skip("only for fused qkv tensors with a given layout, shared GPUs, and backends with modes")
    receipts = honest(PLAN)
    del receipts[3][item]
    (missing,) = check(PLAN, receipts)
    assert (missing.item, missing.rank, missing.observed) == (item, 3, None)
    assert f"the plan says {item} = " in str(missing)
    assert "no receipt" in str(missing)
    if item == "deterministic":
        return
    receipts = honest(PLAN)
    receipts[1][item] = 10**12
    (differing,) = check(PLAN, receipts)
    assert (differing.item, differing.rank, differing.option) == (item, 1, option_of(item))


def test_a_promise_of_determinism_must_be_kept() -> None:
    promised = resolve(Options.of(model="m", deterministic=True), tiny_card(), machine())
    receipts = honest(promised)
    assert check(promised, receipts) == []
    receipts[0]["deterministic"] = False
    assert [mismatch.option for mismatch in check(promised, receipts)] == ["--deterministic"]
    unpromised = honest(PLAN)
    unpromised[0]["deterministic"] = True
    assert check(PLAN, unpromised) == []


@pytest.mark.parametrize("item", [item for item, rule in RULES.items() if rule.where is Where.LEADER])
def test_leaders_show_what_their_scheduler_does(item: str) -> None:
    receipts = honest(PLAN)
    del receipts[2][item]
    assert [(mismatch.item, mismatch.rank) for mismatch in check(PLAN, receipts)] == [(item, 2)]


@pytest.mark.parametrize("item", [*LAYER_RULES, *(i for i, r in RULES.items() if r.where is Where.LAYER)])
def test_each_layer_of_each_rank_must_show_each_item(item: str) -> None:
    """A01: one layer that was built without the asked-for dispatcher, or never called it, is found."""
    path = {**RULES, **LAYER_RULES}[item].path
    for value in (None, 0, "standard"):
        receipts = honest(PLAN)
        entry = receipts[2]["moe_layers"][1]
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value
        (found,) = check(PLAN, receipts)
        assert (found.item, found.rank, found.layer) == (item, 2, 2)
        assert found.option.startswith("--")


def test_a_model_that_forgets_its_dispatcher_is_named() -> None:
    """A01: no MoE layer shows a receipt: every layer of every rank is a mismatch of the a2a option."""
    receipts = honest(PLAN)
    for items in receipts.values():
        items["moe_layers"] = []
    found = [mismatch for mismatch in check(PLAN, receipts) if mismatch.item == "moe_a2a_backend"]
    assert {(mismatch.rank, mismatch.layer) for mismatch in found} == {
        (rank, layer) for rank in range(4) for layer in (1, 2, 3)
    }
    assert all(
        "--moe-a2a-backend: the plan says moe_a2a_backend = collective" in str(mismatch) for mismatch in found
    )


def test_layers_ranks_and_items_that_should_not_exist() -> None:
    receipts = honest(PLAN)
    receipts[0]["moe_layers"] = [*receipts[0]["moe_layers"], {**receipts[0]["moe_layers"][0], "layer": 0}]
    assert {mismatch.layer for mismatch in check(PLAN, receipts)} == {0}
    receipts = honest(PLAN)
    receipts[9] = {}
    assert [mismatch.rank for mismatch in check(PLAN, receipts)] == [9]
    receipts = honest(PLAN)
    receipts[0]["surprise"] = 1
    assert [mismatch.item for mismatch in check(PLAN, receipts)] == ["surprise"]


def test_nothing_at_all_is_not_proof() -> None:
    items = {mismatch.item for mismatch in check(PLAN, {})}
    observable = {item for item, rule in RULES.items() if rule.where is not Where.NOWHERE}
    assert items == {*observable, *LAYER_RULES} - {"qkv_layout", "nccl_library", "moe_a2a_mode"}


def test_buffers_may_be_smaller_than_planned_never_larger() -> None:
    receipts = honest(PLAN)
    receipts[0]["moe_buffer_bytes"] = 0
    assert check(PLAN, receipts) == []
    receipts[0]["moe_buffer_bytes"] = PLAN.moe_buffer_bytes + 1
    assert [mismatch.item for mismatch in check(PLAN, receipts)] == ["moe_buffer_bytes"]


def test_a_model_without_experts_needs_no_expert_receipts() -> None:
    plan = resolve(Options.of(model="m"), dense_card(), machine())
    receipts = honest(plan)
    del receipts[0]["moe_buffer_bytes"]
    assert check(plan, receipts) == []


def test_nodes_are_checked_rank_by_rank() -> None:
    plan = resolve(Options.of(model="m", tp_size=4, nnodes=2, dist_init="a:1"), tiny_card(), machine())
    receipts = honest(plan)
    assert [receipts[rank]["node_rank"] for rank in range(4)] == [0, 0, 1, 1]
    assert check(plan, receipts) == []
    receipts[2]["node_rank"] = 0
    assert [mismatch.option for mismatch in check(plan, receipts)] == ["--node-rank"]


def test_every_option_leads_to_a_receipt_or_a_reason() -> None:
    for option in OPTIONS.values():
        assert all(item in RULES for item in option.items), option.name


def test_both_sides_are_shown() -> None:
    from rich.console import Console

    receipts = copy.deepcopy(honest(PLAN))
    receipts[1]["threads"] = 99
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(explain_receipts(PLAN, receipts, check(PLAN, receipts)))
    text = console.export_text()
    assert "differs" in text
    assert "99 (rank 1)" in text
    assert "--threads: the plan says threads = 16, but rank 1 observed 99" in text
    assert observed_text("threads", {}) == "-"
