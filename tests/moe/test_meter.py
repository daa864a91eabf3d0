"""The meter counts what the experts received, in the steps that it says it counts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.meter import LoadMeter
from interlock.moe.terms import Phase

EXPERTS = 4
NO_SHARES = {Phase.PREFILL: 1, Phase.DECODE: 1}


def meter(every: int = 1, shares: dict[Phase, int] | None = None) -> LoadMeter:
    made = LoadMeter(EXPERTS, torch.device("cpu"), shares=shares or NO_SHARES, every=every)
    made.add_layer(3)
    made.add_layer(1)
    return made


def layouts(counts: list[int]) -> list[ExpertInput]:
    """Rows with these counts in each of the three layouts; what is no row holds other numbers."""
    total = sum(counts)
    lanes = [expert for expert, count in enumerate(counts) for _ in range(count)] + [-1] * 3
    psum = torch.tensor(counts).cumsum(0).to(torch.int32)
    truth = torch.tensor(counts, dtype=torch.int32)
    return [
        ReplicatedRows(torch.zeros(len(lanes), 2), torch.tensor(lanes)[:, None], None),
        ContiguousRows(torch.zeros(total + 5, 2), psum, truth, 1, None),
        MaskedRows(torch.zeros(EXPERTS, max(counts) + 1, 2), truth, None),
    ]


@given(st.lists(st.lists(st.integers(0, 9), min_size=EXPERTS, max_size=EXPERTS), min_size=1, max_size=5))
def test_every_layout_is_counted_alike(steps: list[list[int]]) -> None:
    for kind in range(3):
        counted = meter()
        counted.start()
        for counts in steps:
            counted.begin_step(Phase.DECODE, 7)
            for layer in (1, 3):
                counted.dispatching()
                counted.dispatched(layer, layouts(counts)[kind])
                counted.combining()
                counted.combined()
        expected = torch.tensor(steps).sum(0)
        received = counted.received()
        assert received[Phase.DECODE].tolist() == [expected.tolist()] * 2
        assert not received[Phase.PREFILL].any()
        totals = counted.totals[Phase.DECODE]
        assert (totals.steps, totals.tokens, totals.most_tokens) == (len(steps), 7 * len(steps), 7)
        assert totals.dispatch.calls == totals.combine.calls == 2 * len(steps)
        assert totals.dispatch.seconds > 0


def test_only_sampled_steps_are_counted_and_none_of_the_warm_up() -> None:
    counted = meter(every=3)
    rows = layouts([1, 0, 2, 0])[2]
    for step in range(-2, 7):
        if step == 0:
            counted.start()
        phase = Phase.PREFILL if step % 2 else Phase.DECODE
        counted.begin_step(phase, 4)
        counted.dispatching()
        counted.dispatched(1, rows)
        counted.combining()
        counted.combined()
    steps = {phase: totals.steps for phase, totals in counted.totals.items()}
    assert steps == {Phase.DECODE: 2, Phase.PREFILL: 1}
    received = counted.received()
    assert received[Phase.DECODE].tolist() == [[2, 0, 4, 0], [0, 0, 0, 0]]
    assert received[Phase.PREFILL].tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]
    assert counted.layers == (1, 3)


@pytest.mark.parametrize(("tokens", "share"), [(0, 0), (1, 1), (8, 2), (9, 3)])
def test_a_ranks_share_of_the_tokens(tokens: int, share: int) -> None:
    """Capacity counts tokens of one rank, where a replica's ranks share theirs out."""
    counted = meter(shares={Phase.PREFILL: 4, Phase.DECODE: 1})
    counted.start()
    counted.begin_step(Phase.PREFILL, tokens)
    counted.count_replay(Phase.DECODE, tokens)
    assert counted.totals[Phase.PREFILL].most_tokens == share
    assert counted.totals[Phase.DECODE].tokens == tokens


def test_a_rank_without_layers_says_nothing_was_received() -> None:
    empty = LoadMeter(EXPERTS, torch.device("cpu"), shares=NO_SHARES)
    assert empty.received()[Phase.DECODE].shape == (0, EXPERTS)


def test_a_rank_without_captures_counts_replays_as_steps_only() -> None:
    counted = meter()
    counted.start()
    counted.count_replay(Phase.DECODE, 3)
    assert counted.totals[Phase.DECODE].steps == 1
    assert not counted.received()[Phase.DECODE].any()


@dataclass
class Graph:
    """Stands for a captured step: the tensors that it writes at every replay."""

    rows: dict[int, ExpertInput]

    def replay(self, counts: dict[int, list[int]]) -> None:
        for layer, rows in self.rows.items():
            if isinstance(rows, ReplicatedRows):
                lanes = [expert for expert, count in enumerate(counts[layer]) for _ in range(count)]
                rows.ids.fill_(-1)
                rows.ids.view(-1)[: len(lanes)] = torch.tensor(lanes)
            else:
                rows.counts.copy_(torch.tensor(counts[layer]))


def capture(counted: LoadMeter, size: int, *, masked: bool) -> Graph:
    """Run a step of ``size`` tokens while capturing; its layers have tensors of their own."""
    graph = Graph({})
    counted.begin_step(Phase.DECODE, size)
    for layer in (1, 3):
        counts = torch.full((EXPERTS,), 77, dtype=torch.int32)
        ids = torch.full((size, 2), 1)
        graph.rows[layer] = (
            MaskedRows(torch.zeros(EXPERTS, size, 2), counts, None)
            if masked
            else ReplicatedRows(torch.zeros(size, 2), ids, None)
        )
        counted.dispatching()
        counted.dispatched(layer, graph.rows[layer])
        counted.combining()
        counted.combined()
    return graph


@pytest.mark.parametrize("masked", [False, True])
def test_replays_of_captured_steps_are_counted_from_what_they_leave(masked: bool) -> None:
    """The bucket that a batch runs in is the smallest that holds it; only sampled replays are read."""
    capturing = [False]
    counted = LoadMeter(
        EXPERTS, torch.device("cpu"), shares=NO_SHARES, every=2, is_capturing=lambda: capturing[0]
    )
    for layer in (3, 1):
        counted.add_layer(layer)
    capturing[0] = True
    graphs = {size: capture(counted, size, masked=masked) for size in (8, 4)}
    capturing[0] = False
    counted.start()
    unread = {1: [2, 2, 2, 2], 3: [2, 2, 2, 2]}
    replays = [(3, {1: [1, 0, 2, 0], 3: [0, 0, 0, 3]}), (2, unread), (6, {1: [0, 5, 0, 0], 3: [1, 1, 1, 1]})]
    replays += [(4, unread), (4, {1: [1, 1, 1, 1], 3: [0, 0, 0, 4]})]
    for live, counts in replays:
        graphs[4 if live <= 4 else 8].replay(counts)
        counted.count_replay(Phase.DECODE, live)
    assert counted.received()[Phase.DECODE].tolist() == [[2, 6, 3, 1], [1, 1, 1, 8]]
    assert (counted.totals[Phase.DECODE].steps, counted.totals[Phase.DECODE].tokens) == (3, 13)
    assert counted.totals[Phase.DECODE].dispatch.calls == 0


@pytest.mark.parametrize("captured", [False, True])
def test_both_halves_of_a_step_are_counted(captured: bool) -> None:
    """Two-batch overlap: rows arrive in two parts, eagerly and in a graph that is replayed."""
    capturing = [captured]
    counted = LoadMeter(
        EXPERTS, torch.device("cpu"), shares=NO_SHARES, every=1, is_capturing=lambda: capturing[0]
    )
    for layer in (1, 3):
        counted.add_layer(layer)
    if not captured:
        counted.start()
    counted.begin_step(Phase.DECODE, 5)
    for layer in (1, 3):
        for half, counts in enumerate(([1, 0, 2, 0], [0, 5, 0, layer])):
            counted.dispatching()
            counted.dispatched(layer, layouts(counts)[2], half=half)
        counted.combining()
        counted.combined()
    capturing[0] = False
    if captured:
        counted.start()
        counted.count_replay(Phase.DECODE, 5)
    assert counted.received()[Phase.DECODE].tolist() == [[1, 5, 2, 1], [1, 5, 2, 3]]
    assert (counted.totals[Phase.DECODE].steps, counted.totals[Phase.DECODE].tokens) == (1, 5)


def test_layers_that_share_memory_in_a_capture_are_not_guessed_at() -> None:
    capturing = [True]
    counted = LoadMeter(
        EXPERTS, torch.device("cpu"), shares=NO_SHARES, every=1, is_capturing=lambda: capturing[0]
    )
    rows = layouts([1, 0, 2, 0])[2]
    for layer in (1, 3):
        counted.add_layer(layer)
    counted.begin_step(Phase.DECODE, 4)
    for layer in (1, 3):
        counted.dispatched(layer, rows)
    capturing[0] = False
    counted.start()
    counted.count_replay(Phase.DECODE, 4)
    assert not counted.received()[Phase.DECODE].any()


@pytest.mark.gpu
def test_replays_of_a_real_graph_and_times_that_wait_for_nobody() -> None:
    """Nothing is added to the graph; events are read once they are over."""
    device = torch.device("cuda")
    counted = LoadMeter(EXPERTS, device, shares=NO_SHARES, every=1)
    counted.add_layer(0)
    source = torch.full((6, 1), -1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted.begin_step(Phase.DECODE, 6)
        rows = ReplicatedRows(torch.zeros(6, 2, device=device), source.clone(), None)
        counted.dispatching()
        counted.dispatched(0, rows)
    counted.start()
    for live in (2, 3):
        source.fill_(-1)
        source[:live] = 1
        graph.replay()
        counted.count_replay(Phase.DECODE, live)
    counted.begin_step(Phase.PREFILL, 6)
    counted.dispatching()
    counted.dispatched(0, rows)
    torch.cuda.synchronize()
    received = counted.received()
    assert received[Phase.DECODE].tolist() == [[0, 5, 0, 0]]
    assert received[Phase.PREFILL].tolist() == [[0, 3, 0, 0]]
    assert counted.totals[Phase.DECODE].tokens == 5
    assert counted.totals[Phase.PREFILL].dispatch.calls == 1
