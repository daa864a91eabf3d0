"""Buffers of captured steps hold what an eager step holds, with padding that reaches nothing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.batch import Batch, to_step
from interlock.engine.step_buffers import Space, StepBuffers
from tests.engine.simulation import Simulation, prompt_of, sim_plan

WINDOWS = {"full": (None,), "hybrid": (None, 6), "window": (8,)}


def decode_batches(sim: Simulation) -> list[Batch]:
    """Run to the end, keeping every decode batch."""
    found = []
    while sim.scheduler.has_work:
        batch = sim.step()
        assert batch is not None
        if not batch.chunks:
            found.append(batch)
    return found


@given(
    windows=st.sampled_from([*WINDOWS]),
    requests=st.integers(1, 6),
    spare=st.integers(0, 3),
    given_tokens=st.booleans(),
)
def test_a_bucket_is_the_step_and_padding(
    windows: str, requests: int, spare: int, given_tokens: bool
) -> None:
    sim = Simulation(sim_plan(WINDOWS[windows]))
    for index in range(requests):
        sim.add(prompt_of(5 + 3 * index, salt=index), max_tokens=3 + index, ignore_eos=True)
    space = Space(full=windows != "window", window=windows != "full")
    buffers = StepBuffers(8, 32, space, torch.device("cpu"))
    for batch in decode_batches(sim):
        wanted = to_step(batch.arrays)
        count = wanted.num_sequences
        bucket = min(8, count + spare)
        step = buffers.step(bucket)
        tokens = wanted.token_ids + 1 if given_tokens else None
        buffers.fill(batch.arrays, tokens)
        assert step.num_tokens == step.num_sequences == bucket
        assert step.live_count is not None
        assert step.live_count.tolist() == [count]
        expected = wanted.token_ids if tokens is None else tokens
        assert step.token_ids.tolist() == expected.tolist() + [0] * (bucket - count)
        assert step.positions[:count].equal(wanted.positions)
        assert step.query_start.tolist() == [*range(count + 1), *[count] * (bucket - count)]
        assert step.kv_len.tolist() == wanted.kv_len.tolist() + [0] * (bucket - count)
        for mine, theirs in ((step.full, wanted.full), (step.window, wanted.window)):
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            assert mine.slots.tolist() == theirs.slots.tolist() + [-1] * (bucket - count)
            used = theirs.table.shape[1]
            assert mine.table[:count, :used].equal(theirs.table)
