"""Any combination of options is either planned consistently or refused with an alternative that works."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import Refusal
from interlock.moe.terms import Layout
from interlock.options import OPTIONS, Options
from interlock.plan.card import ModelCard
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.nearest import read_flags
from interlock.plan.resolve import resolve
from tests.plan.machines import GIB, dense_card, gpu_machine, machine, mimo_card, tiny_card

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "tp_size": SIZES,
    "ep_size": SIZES,
    "attn_dp_size": SIZES,
    "nnodes": st.sampled_from([1, 2, 3]),
    "node_rank": st.sampled_from([0, 1, 5]),
    "dist_init": st.sampled_from(["10.0.0.1:29500", "nonsense"]),
    "device": st.sampled_from(["cpu", "cuda"]),
    "kernels": st.sampled_from(["cpu", "torch"]),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "kv_cache_dtype": st.sampled_from(["float32", "bfloat16"]),
    "deterministic": st.booleans(),
    "sliding_window_extra": st.sampled_from([0, 1, 2]),
    "qkv_layout": st.sampled_from(["plain", "chunked"]),
    "moe_a2a_backend": st.sampled_from(["none", "collective", "shared_memory"]),
    "moe_runner_backend": st.sampled_from(["torch", "cpu"]),
    "moe_prefill_capacity": st.sampled_from([1, 16, 64, 512, 4096]),
    "moe_decode_capacity": st.sampled_from([1, 16, 64, 512]),
    "max_model_len": st.sampled_from([2, 64, 1000, 4096, 10**6]),
    "max_running_requests": st.sampled_from([1, 6, 64, 1000]),
    "chunked_prefill_size": st.sampled_from([1, 16, 64, 1000, 8192]),
    "page_size": st.sampled_from([1, 4, 16, 128, 1024]),
    "kv_memory": st.sampled_from(["1KiB", "1MiB", "64MiB", "4GiB", "300GiB"]),
    "prefix_cache": st.booleans(),
    "threads": st.sampled_from([1, 2, 500]),
    "port": st.sampled_from([0, 80, 70000]),
    "demo_source": st.just("/tmp/x.gguf"),
}
REQUESTS = st.fixed_dictionaries({}, optional=VALUES)
MACHINES = {
    "cpu": machine(),
    "small": machine(cores=1, memory_available=2 * GIB),
    "no compiler": machine(native_kernels_problem="no C++ compiler is on PATH"),
    "gpus": gpu_machine(),
    "one gpu": gpu_machine(gpus=1),
}
CARDS = {
    "tiny": tiny_card(),
    "dense": dense_card(),
    "fp8": tiny_card(weight_format="fp8_block", dtype="bfloat16"),
}
ENOUGH = settings(max_examples=30, deadline=None)
"""Deadlines are off: the machine that runs the tests may be busy."""


@pytest.mark.parametrize("place", MACHINES)
@pytest.mark.parametrize("kind", CARDS)
@given(asked=REQUESTS)
@ENOUGH
def test_planned_consistently_or_refused_with_what_works(
    kind: str, place: str, asked: dict[str, Any]
) -> None:
    check(CARDS[kind], MACHINES[place], asked, must_have_alternative=True)


@pytest.mark.slow
@given(asked=REQUESTS, kind=st.sampled_from(sorted(CARDS)), place=st.sampled_from(sorted(MACHINES)))
@settings(max_examples=5000, deadline=None)
def test_planned_consistently_or_refused_long(asked: dict[str, Any], kind: str, place: str) -> None:
    check(CARDS[kind], MACHINES[place], asked, must_have_alternative=True)


@given(asked=REQUESTS, nodes=st.sampled_from([1, 2]))
@ENOUGH
def test_large_model(asked: dict[str, Any], nodes: int) -> None:
    """Where the model does not fit the machine there may be nothing to offer, but never a wrong offer."""
    asked = {"tp_size": 8 * nodes, "nnodes": nodes, "dist_init": "10.0.0.1:1", **asked}
    check(FLASH, MACHINES["gpus"], asked, must_have_alternative=False)


FLASH = mimo_card()


def check(
    card: ModelCard, facts: MachineFacts, asked: dict[str, Any], *, must_have_alternative: bool
) -> None:
    options = Options.of(model="m", **asked)
    plan = attempt(options, card, facts)
    if isinstance(plan, Refusal):
        assert plan.option.startswith("--")
        assert plan.rule
        assert not must_have_alternative or plan.alternatives, plan
        for alternative in plan.alternatives:
            changed = options.changed(read_flags(alternative))
            assert_consistent(resolve(changed, card, facts), changed)
        return
    assert_consistent(plan, options)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=LaunchPlan) == plan


def attempt(options: Options, card: ModelCard, facts: MachineFacts) -> LaunchPlan | Refusal:
    try:
        return resolve(options, card, facts)
    except Refusal as refusal:
        return refusal


def assert_consistent(plan: LaunchPlan, options: Options) -> None:
    """Invariants that the engine relies on."""
    assert_user_kept(plan, options)
    tp, ep, dp = plan.tp_size, plan.ep_size, plan.attn_dp_size
    assert tp % ep == tp % dp == tp % plan.nnodes == 0
    assert 0 <= plan.node_rank < plan.nnodes
    for layer in plan.card.layers:
        kv_heads = layer.attention.num_kv_heads
        assert layer.attention.num_heads % plan.attn_tp_size == 0
        assert kv_heads % plan.attn_tp_size == 0 or plan.attn_tp_size % kv_heads == 0
    assert plan.threads >= 1
    assert plan.page_size <= plan.chunked_prefill_size
    assert_capacity(plan)
    assert_memory(plan)
    if plan.deterministic:
        assert plan.kernels == "cpu"
        assert plan.moe_runner_backend != "torch"
        assert ep == tp or plan.card.experts is None


def assert_user_kept(plan: LaunchPlan, options: Options) -> None:
    """Rules fill what was left open and never change what the user set."""
    assert set(plan.provenance) == set(LaunchPlan.__struct_fields__) - {"provenance"}
    assert all(item.reason for item in plan.provenance.values())
    for name, given_ in options.given.items():
        if name in plan.provenance and name != "model":
            assert getattr(plan, name) == given_.value
            assert plan.provenance[name].source is Source.USER
    set_items = {item for name in options.given for item in OPTIONS[name].items}
    by_user = {item for item, provenance in plan.provenance.items() if provenance.source is Source.USER}
    assert by_user <= set_items


def assert_capacity(plan: LaunchPlan) -> None:
    """T holds the largest chunk and the largest batch of a rank."""
    experts = plan.card.experts
    if experts is None:
        assert (plan.moe_runner_backend, plan.moe_buffer_bytes) == ("none", 0)
        return
    assert experts.num_experts % plan.ep_size == 0
    assert experts.intermediate_size % plan.experts_tp_size == 0
    for layout, tokens, capacity in (
        (plan.moe_layout_prefill, plan.chunked_prefill_size, plan.moe_prefill_capacity),
        (plan.moe_layout_decode, plan.max_running_requests, plan.moe_decode_capacity),
    ):
        split = 1 if layout == Layout.REPLICATED else plan.attn_tp_size
        assert capacity * split >= tokens
    if plan.moe_a2a_backend != "none" and plan.tp_size > 1:
        assert plan.ep_size > 1


def assert_memory(plan: LaunchPlan) -> None:
    """Everything fits, and the pools hold one longest request while it is computed chunk by chunk."""
    memory, page = plan.memory, plan.page_size
    assert memory.total <= memory.available
    assert memory.a2a_buffers == plan.moe_buffer_bytes
    assert 2 <= plan.max_model_len <= plan.card.max_position
    windows = [layer.attention.window for layer in plan.card.layers if layer.attention.window is not None]
    if any(layer.attention.window is None for layer in plan.card.layers):
        assert plan.full_pages * page >= plan.max_model_len
    if windows:
        window = max(windows) + plan.sliding_window_extra
        held = -(-(window - 1 + plan.chunked_prefill_size) // page) + 1
        least = -(-window // page) + 1
        assert plan.window_pages >= max(least, min(held, -(-plan.max_model_len // page)))
