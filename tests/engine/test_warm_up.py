"""Which steps a rank runs before it says ready."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.warm_up import eager_batches, warm_up_phases
from interlock.kernels.triton.attention_tiles import AttentionTile
from interlock.moe.terms import Phase
from interlock.plan.launch_plan import LaunchPlan
from tests.plan.machines import tiny_card
from tests.plans import make_plan


def next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def plan_of(most: int, graphs: tuple[int, ...]) -> LaunchPlan:
    return make_plan(tiny_card(), max_running_requests=most, cuda_graph_sizes=graphs)


@given(
    most=st.integers(1, 600),
    graphs=st.sampled_from([(), (1,), (1, 2, 4), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]),
    programs=st.integers(1, 2000),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
)
def test_no_decode_step_meets_a_kernel_that_was_not_compiled(
    most: int, graphs: tuple[int, ...], programs: int, kv_heads: int
) -> None:
    """Decode attention is compiled for each power of two of the parts that keys are cut into."""
    plan = plan_of(most, graphs)
    tile = AttentionTile(16, 64, 4, 2, programs)

    def compiled_for(batch: int) -> int:
        return next_power(tile.key_splits(batch * kv_heads, 1 << 20))

    held = max(graphs, default=0)
    sizes = eager_batches(plan)
    assert all(held < size <= most for size in sizes)
    assert (most in sizes) == (most > held)
    ready = {compiled_for(size) for size in (*graphs, *sizes)}
    assert {compiled_for(batch) for batch in range(held + 1, most + 1)} <= ready


def test_a_server_that_only_prefills_compiles_no_more_for_decode() -> None:
    assert eager_batches(make_plan(tiny_card(), max_running_requests=8, disaggregation_mode="prefill")) == []


def test_steps_have_the_sequences_that_they_are_to_have() -> None:
    """On a CPU one step of each phase; the pages of all are there."""
    plan = plan_of(6, ())
    (steps,) = warm_up_phases(plan, torch.device("cpu"))
    assert [step.phase for step in steps] == [Phase.PREFILL, Phase.DECODE]
    for step in steps:
        assert step.full is not None
        assert (
            0 <= int(step.full.slots.min()) <= int(step.full.slots.max()) < plan.full_pages * plan.page_size
        )
