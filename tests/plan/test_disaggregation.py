"""The items of a disaggregated server: roles, backends, options without effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from interlock.errors import Refusal
from interlock.kv.transfer.registry import transfer_backends
from interlock.options import Options
from interlock.plan.disaggregation import transfer_problem
from interlock.plan.join import Declarations
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, machine, mimo_card, tiny_card

SHARED = transfer_backends().get("shared_memory")


def plan(**options: object) -> LaunchPlan:
    return resolve(Options.of(model="m", **options), tiny_card(), machine())


def test_a_server_that_does_both_has_no_items_of_the_kind() -> None:
    made = plan()
    assert made.disaggregation_mode == "none"
    assert made.disaggregation_transfer_backend == ""
    assert made.provenance["disaggregation_mode"].source is Source.DEFAULT


@pytest.mark.parametrize("tp_size", [1, 2])
def test_each_role_plans_little_for_the_other_phase(tp_size: int) -> None:
    both, prefill, decode = (
        plan(tp_size=tp_size, disaggregation_mode=mode, moe_a2a_backend="collective")
        for mode in ("none", "prefill", "decode")
    )
    assert prefill.moe_prefill_capacity == both.moe_prefill_capacity
    assert prefill.moe_decode_capacity < both.moe_decode_capacity
    assert prefill.max_running_requests == both.max_running_requests
    assert decode.moe_decode_capacity == both.moe_decode_capacity
    assert decode.moe_prefill_capacity < both.moe_prefill_capacity
    assert "warm-up" in prefill.provenance["moe_decode_capacity"].reason
    assert "prompts only again" in decode.provenance["chunked_prefill_size"].reason


def test_what_a_user_sets_for_the_other_phase_holds() -> None:
    made = plan(disaggregation_mode="prefill", moe_a2a_backend="collective", moe_decode_capacity=64)
    assert made.moe_decode_capacity == 64
    made = plan(disaggregation_mode="decode", chunked_prefill_size=512)
    assert made.chunked_prefill_size == 512


def on_a_gpu(**options: object) -> LaunchPlan:
    declared = Declarations.registered()
    both = replace(SHARED, devices=frozenset({"cpu", "cuda"}))
    declared = replace(declared, transfers={"shared_memory": both})
    card = mimo_card(num_hidden_layers=2, n_routed_experts=16)
    return resolve(Options.of(model="m", **options), card, gpu_machine(gpus=1), declared=declared)


def test_a_prefill_server_captures_no_decode_graphs() -> None:
    assert on_a_gpu(disaggregation_mode="decode").cuda_graph_sizes
    prefill = on_a_gpu(disaggregation_mode="prefill")
    assert prefill.cuda_graph_sizes == ()
    assert "no decode steps" in prefill.provenance["cuda_graph_sizes"].reason
    with pytest.raises(Refusal, match="no decode steps"):
        on_a_gpu(disaggregation_mode="prefill", cuda_graph_max_batch=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disaggregation_timeout": 5}, "has no effect without"),
        ({"disaggregation_queue_timeout": 5}, "has no effect without"),
        ({"disaggregation_bootstrap_port": 9000}, "has no effect without"),
        ({"disaggregation_transfer_backend": "shared_memory"}, "has no effect without"),
        ({"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 9000}, "each request names"),
        ({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 70000}, "65535"),
        (
            {"disaggregation_mode": "prefill", "nnodes": 2, "tp_size": 2, "dist_init": "10.0.0.1:1"},
            "on one node",
        ),
        ({"disaggregation_mode": "prefil"}, "prefill"),
    ],
)
def test_what_has_no_effect_or_does_not_exist_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(Refusal, match=words):
        plan(**options)


def test_a_backend_that_is_not_ready_is_refused_with_the_reason() -> None:
    demanding = replace(SHARED, packages=("nonesuch>=2",), libraries=("libnone.so.1",), priority=99)
    spare = replace(SHARED, name="spare")
    declared = replace(Declarations.registered(), transfers={"shared_memory": demanding, "spare": spare})

    def tried(facts_changes: dict[str, object], **options: object) -> LaunchPlan:
        asked = Options.of(model="m", disaggregation_mode="decode", **options)
        return resolve(asked, tiny_card(), machine(**facts_changes), declared=declared)

    assert tried({}).disaggregation_transfer_backend == "spare"
    declared = replace(declared, transfers={"shared_memory": demanding})
    there = {"packages": {"torch": "2.13.0", "nonesuch": "2.1"}}
    for facts, words in (
        ({}, "nonesuch>=2, which is not installed"),
        (there, "not probed"),
        (there | {"libraries": {"libnone.so.1": "cannot open"}}, "libnone.so.1: cannot open"),
    ):
        with pytest.raises(Refusal, match=words):
            tried(dict(facts), disaggregation_transfer_backend="shared_memory")
    ready = there | {"libraries": {"libnone.so.1": ""}}
    assert tried(ready).disaggregation_transfer_backend == "shared_memory"
    with pytest.raises(Refusal, match="no transfer backend is ready here: shared_memory needs"):
        tried({})


def test_one_of_several_packages_is_enough_and_a_missing_library_comes_with_advice() -> None:
    """Mooncake's wheels, and the library that they load."""
    mooncake = transfer_backends().get("mooncake")
    (library,) = mooncake.libraries

    def problem(packages: dict[str, str], error: str) -> str | None:
        return transfer_problem(mooncake, machine(packages=packages, libraries={library: error}), "cpu")

    nothing = problem({}, "")
    assert nothing is not None
    for text in mooncake.one_of:
        assert text in nothing
        assert problem({text.partition(">=")[0]: "0.3.13"}, "") is None
        assert "0.3.1 is installed" in str(problem({mooncake.one_of[0].partition(">=")[0]: "0.3.1"}, ""))
        missing = problem({text.partition(">=")[0]: "0.3.13"}, "cannot open shared object file")
        assert missing is not None
        assert "cannot open" in missing
        assert "apt-get install libibverbs1" in missing
    wanted = Declarations.registered().packages()
    assert {text.partition(">=")[0] for text in mooncake.one_of} <= wanted
