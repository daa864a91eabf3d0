"""T of each phase, from the scheduler's limits: reports A06 and B14."""

from __future__ import annotations

import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.resolve import resolve
from tests.plan.machines import dense_card, machine, tiny_card


def plan_for(**asked: object) -> LaunchPlan:
    return resolve(Options.of(model="m", **asked), tiny_card(), machine())


def test_t_follows_from_chunk_and_batch() -> None:
    plan = plan_for(chunked_prefill_size=100, max_running_requests=30)
    assert (plan.moe_prefill_capacity, plan.moe_decode_capacity) == (100, 30)


def test_tokens_are_shared_out_over_attention_tp_before_an_exchange() -> None:
    asked = {"tp_size": 4, "attn_dp_size": 1, "chunked_prefill_size": 101, "max_running_requests": 30}
    exchanged = plan_for(moe_a2a_backend="collective", **asked)
    assert (exchanged.moe_prefill_capacity, exchanged.moe_decode_capacity) == (26, 8)
    replicated = plan_for(**asked)
    assert (replicated.moe_prefill_capacity, replicated.moe_decode_capacity) == (101, 30)


def test_a_cap_of_16_with_32_running_is_refused() -> None:
    """A06: refused at plan time, never an assertion under load; either number can be changed."""
    with pytest.raises(Refusal, match="batch of 32 requests") as caught:
        plan_for(moe_decode_capacity=16, max_running_requests=32)
    assert caught.value.option == "--moe-decode-capacity"
    assert caught.value.alternatives == ("--moe-decode-capacity 32", "--max-running-requests 16")


def test_a_cap_alone_lowers_what_was_left_open_and_says_so() -> None:
    """A06: with the limit on auto the cap decides it, visibly."""
    plan = plan_for(moe_decode_capacity=16, moe_prefill_capacity=64)
    assert (plan.max_running_requests, plan.chunked_prefill_size) == (16, 64)
    assert "--moe-decode-capacity" in plan.provenance["max_running_requests"].reason


def test_a_cap_of_32_with_32_running_is_planned() -> None:
    """A06, second half."""
    assert plan_for(moe_decode_capacity=32, max_running_requests=32).moe_decode_capacity == 32


def test_a_chunk_larger_than_t_is_refused() -> None:
    with pytest.raises(Refusal, match="chunk of 512 tokens") as caught:
        plan_for(moe_prefill_capacity=256, chunked_prefill_size=512)
    assert "--moe-prefill-capacity 512" in caught.value.alternatives


def test_a_larger_t_than_needed_reserves_more_memory() -> None:
    small = plan_for(tp_size=2, moe_a2a_backend="shared_memory")
    large = plan_for(tp_size=2, moe_a2a_backend="shared_memory", moe_prefill_capacity=4096)
    assert large.moe_buffer_bytes > small.moe_buffer_bytes
    assert large.memory.a2a_buffers == large.moe_buffer_bytes


def test_without_experts_a_capacity_is_refused() -> None:
    with pytest.raises(Refusal, match="no effect"):
        resolve(Options.of(model="m", moe_decode_capacity=64), dense_card(), machine())
