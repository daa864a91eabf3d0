"""The contiguous and masked layouts: positions, padding, and the lists that kernels take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.moe.a2a.contract import ContractError
from interlock.moe.a2a.rows import ContiguousRows, MaskedRows, ReplicatedRows
from interlock.moe.layouts import (
    aligned_segments,
    count_lanes,
    expert_rows,
    filled_rows,
    positions,
    segments_of,
    slab_segments,
)
from interlock.moe.placement import place


def test_padded_and_true_counts_are_two_things() -> None:
    """B26: counts 0, 1, 128, 129 with A = 128 take 0, 128, 128, 256 rows; 258 of them are filled."""
    segments = aligned_segments(torch.tensor([0, 1, 128, 129]), 128)
    assert segments.starts.tolist() == [0, 0, 128, 256]
    assert segments.psum.tolist() == [0, 1, 256, 385]
    assert segments.rows == 512
    assert filled_rows(segments).numel() == 258


def test_nothing_received_takes_no_rows() -> None:
    """B26, B31: all-zero counts are an empty layout, not a missing one."""
    segments = aligned_segments(torch.zeros(4, dtype=torch.int64), 128)
    assert segments.rows == 0
    assert filled_rows(segments).numel() == 0
    rows = ContiguousRows(torch.empty(0, 8), segments.psum.int(), segments.counts.int(), 128, None)
    lists = expert_rows(rows, 4)
    assert lists.offsets.tolist() == [0] * 5
    assert lists.source.numel() == 0


@pytest.mark.parametrize(("counts", "rows"), [(0, 0), (1, 128), (100, 128), (129, 256)])
def test_work_follows_what_was_received(counts: int, rows: int) -> None:
    """B31: a rank that received nothing has no rows, whatever its capacity."""
    assert aligned_segments(torch.tensor([counts]), 128).rows == rows


def test_slab_overflow_is_an_error() -> None:
    """B24: more rows than the slab holds are refused with both numbers."""
    with pytest.raises(ContractError, match="received 40 rows, its slab holds 24"):
        slab_segments(torch.tensor([3, 40]), 24)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lanes=st.integers(0, 60),
    experts=st.integers(1, 7),
    alignment=st.sampled_from([1, 3, 8, 128]),
)
def test_positions_are_a_stable_grouping(seed: int, lanes: int, experts: int, alignment: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randint(0, experts, (lanes,), generator=generator)
    counts = count_lanes(wanted, experts)
    for segments in (aligned_segments(counts, alignment), slab_segments(counts, max(1, lanes))):
        at = positions(wanted, segments)
        assert at.unique().numel() == lanes
        assert at.sort().values.tolist() == sorted(filled_rows(segments).tolist())
        for expert in range(experts):
            mine = at[wanted == expert].tolist()
            start = int(segments.starts[expert])
            assert mine == list(range(start, start + len(mine)))
        assert torch.equal(segments.psum, segments.starts + counts)
    aligned = aligned_segments(counts, alignment)
    assert aligned.rows % alignment == 0
    assert (aligned.starts % alignment == 0).all()


def test_lists_of_every_layout_name_the_same_work() -> None:
    """One set of lanes, three layouts: experts see the same rows with the same weights."""
    ids = torch.tensor([[0, 2], [-1, 2], [-1, -1], [1, 2]])
    weights = torch.tensor([[0.5, 1.5], [9.0, 2.5], [9.0, 9.0], [3.5, 4.5]])
    lists = expert_rows(ReplicatedRows(torch.zeros(4, 8), ids, weights), 3)
    assert lists.offsets.tolist() == [0, 1, 2, 5]
    assert lists.source.tolist() == [0, 3, 0, 1, 3]
    assert lists.target.tolist() == [0, 6, 1, 3, 7]
    assert lists.weight.tolist() == [0.5, 3.5, 1.5, 2.5, 4.5]

    counts = torch.tensor([1, 1, 3])
    segments = aligned_segments(counts, 4)
    flat = torch.full((segments.rows,), 7.0)
    flat[filled_rows(segments)] = lists.weight
    contiguous = ContiguousRows(torch.zeros(12, 8), segments.psum.int(), counts.int(), 4, flat)
    assert expert_rows(contiguous, 3).source.tolist() == [0, 4, 8, 9, 10]
    assert torch.equal(expert_rows(contiguous, 3).weight, lists.weight)

    slab = torch.full((3, 5), 7.0)
    slab[0, :1], slab[1, :1], slab[2, :3] = lists.weight[:1], lists.weight[1:2], lists.weight[2:]
    masked = MaskedRows(torch.zeros(3, 5, 8), counts.int(), slab)
    assert expert_rows(masked, 3).target.tolist() == [0, 5, 10, 11, 12]
    assert torch.equal(expert_rows(masked, 3).weight, lists.weight)


def test_contradicting_fields_are_refused() -> None:
    """B26: psum that does not follow from counts and alignment is caught before a kernel reads it."""
    counts = torch.tensor([1, 2], dtype=torch.int32)
    rows = torch.zeros(8, 4)
    with pytest.raises(ContractError, match="does not follow"):
        segments_of(ContiguousRows(rows, torch.tensor([1, 3], dtype=torch.int32), counts, 4, None))
    with pytest.raises(ContractError, match="need 8 rows, 4 were given"):
        segments_of(ContiguousRows(rows[:4], torch.tensor([1, 6], dtype=torch.int32), counts, 4, None))


def test_unused_slots_are_no_work() -> None:
    """B09: ids [[3, -1], [-1, -1], [7, 0]] are three lanes, one of them expert 7's."""
    ids = torch.tensor([[3, -1], [-1, -1], [7, 0]])
    assert count_lanes(ids, 8).tolist() == [1, 0, 0, 1, 0, 0, 0, 1]
    assert expert_rows(ReplicatedRows(torch.zeros(3, 4), ids, None), 8).source.tolist() == [2, 0, 2]


def test_placement_examples() -> None:
    """B13: one function for allocator, loader and dispatcher."""
    assert [len(part) for part in place(30, 8)] == [4, 4, 4, 4, 4, 4, 3, 3]
    assert [len(part) for part in place(128, 6)] == [22, 22, 21, 21, 21, 21]
    with pytest.raises(ValueError, match="cannot place 3 experts on 4 ranks"):
        place(3, 4)


@given(ranks=st.integers(1, 64), extra=st.integers(0, 400))
def test_placement_is_a_balanced_partition(ranks: int, extra: int) -> None:
    """B13: sizes differ by at most one, and every expert has exactly one home."""
    parts = place(ranks + extra, ranks)
    assert [expert for part in parts for expert in part] == list(range(ranks + extra))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
