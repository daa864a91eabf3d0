"""What ``--moe-a2a-backend auto`` becomes: an exchange where experts are spread and one works, else none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.facts import MachineFacts
from interlock.plan.join import Declarations
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, machine, tiny_card


def plan(facts: MachineFacts, **options: Any) -> LaunchPlan:
    return resolve(Options.of(model="m", **options), tiny_card(dtype="bfloat16"), facts)


def test_what_was_never_run_is_not_chosen_by_itself() -> None:
    untried = Declarations.registered()
    untried = replace(
        untried, a2a={**untried.a2a, "symmetric": replace(untried.a2a["symmetric"], never_run="a GPU")}
    )
    options = Options.of(model="m", tp_size=4, ep_size=4)
    made = resolve(options, tiny_card(dtype="bfloat16"), gpu_machine(4), declared=untried)
    assert made.moe_a2a_backend == "none"
    assert "symmetric was never run: it wants a GPU" in made.provenance["moe_a2a_backend"].reason


def test_experts_spread_over_gpus_of_one_machine_are_exchanged() -> None:
    made = plan(gpu_machine(4), tp_size=4, ep_size=4)
    assert made.moe_a2a_backend == "symmetric"
    assert (made.moe_layout_prefill, made.moe_layout_decode) == ("contiguous", "masked")
    assert "--ep-size 4 spreads the experts" in made.provenance["moe_a2a_backend"].reason
    assert made.cuda_graph_sizes, "its decode steps can be captured"
    assert made.moe_buffer_bytes % 4 == 0
    assert made.moe_buffer_bytes > 2 * 2**20


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        (gpu_machine(4), {"tp_size": 4}, "no --ep-size spreads the experts"),
        (gpu_machine(4), {"tp_size": 4, "ep_size": 1}, "no --ep-size spreads the experts"),
        (gpu_machine(4), {"tp_size": 4, "ep_size": 2}, "symmetric needs different experts on every rank"),
        (machine(), {"tp_size": 2, "ep_size": 2}, "symmetric runs on cuda, not on cpu"),
        (
            gpu_machine(4),
            {"tp_size": 8, "ep_size": 8, "nnodes": 2, "node_rank": 0, "dist_init": "10.0.0.1:5"},
            "reaches ranks of one machine",
        ),
    ],
)
def test_nothing_is_exchanged_otherwise_and_the_plan_says_why(
    facts: MachineFacts, options: dict[str, Any], reason: str
) -> None:
    made = plan(facts, **options)
    assert made.moe_a2a_backend == "none"
    assert reason in made.provenance["moe_a2a_backend"].reason


def test_a_name_that_was_asked_for_is_kept() -> None:
    for name in ("none", "collective", "symmetric"):
        made = plan(gpu_machine(4), tp_size=4, ep_size=4, moe_a2a_backend=name)
        assert made.moe_a2a_backend == name
        assert made.provenance["moe_a2a_backend"].source.value == "user"


def test_the_highest_priority_that_works_wins() -> None:
    declared = Declarations.registered()
    better = replace(declared.a2a["collective"], priority=20)
    unable = replace(declared.a2a["collective"], name="unable", priority=30, max_ranks=2)
    declared = replace(declared, a2a={**declared.a2a, "collective": better, "unable": unable})
    options = Options.of(model="m", tp_size=4, ep_size=4)
    made = resolve(options, tiny_card(dtype="bfloat16"), gpu_machine(4), declared=declared)
    assert made.moe_a2a_backend == "collective"
    assert "passed over: unable works with at most 2" in made.provenance["moe_a2a_backend"].reason


def test_the_bytes_count_the_alignment_that_the_runner_wants() -> None:
    """A plan that reserved less than the dispatcher allocates would be refused by its own receipt."""
    card = tiny_card(dtype="bfloat16")
    loose, tight = (
        resolve(
            Options.of(model="m", tp_size=2, moe_a2a_backend="symmetric", moe_runner_backend="triton"),
            card,
            gpu_machine(2),
            declared=aligned,
        )
        for aligned in (with_alignment(1), with_alignment(4096))
    )
    assert tight.moe_buffer_bytes > loose.moe_buffer_bytes


def with_alignment(alignment: int) -> Declarations:
    declared = Declarations.registered()
    runner = replace(declared.runners["triton"], alignment=alignment)
    return replace(declared, runners={**declared.runners, "triton": runner})


REPLICAS = {"tp_size": 4, "attn_dp_size": 4, "ep_size": 4, "max_running_requests": 8}


def test_replicas_replay_graphs_of_their_own_sizes_when_asked() -> None:
    asked = plan(gpu_machine(4), **REPLICAS, cuda_graph_max_batch=8)
    assert asked.moe_a2a_backend == "symmetric"
    assert asked.cuda_graph_sizes == (1, 2, 4, 8)
    left = plan(gpu_machine(4), **REPLICAS)
    assert left.cuda_graph_sizes == ()
    assert "--cuda-graph-max-batch N to try" in left.provenance["cuda_graph_sizes"].reason


@pytest.mark.parametrize("backend", ["none", "collective"])
def test_replicas_of_other_backends_have_no_graphs(backend: str) -> None:
    with pytest.raises(Refusal, match="batches of different sizes"):
        plan(gpu_machine(4), **REPLICAS, moe_a2a_backend=backend, cuda_graph_max_batch=8)
