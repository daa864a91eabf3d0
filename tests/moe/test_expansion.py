"""Received rows to their lanes' places: counted without the host, copied alike by torch and Triton."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.moe.a2a.deepep_v2.expansion import ordered_lanes
from interlock.moe.a2a.deepep_v2.row_copies import Target, copy_lanes


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 24),
    spare=st.integers(0, 5),
    experts=st.integers(1, 5),
    lanes=st.integers(1, 3),
)
def test_places_are_by_expert_source_and_token(
    seed: int, rows: int, spare: int, experts: int, lanes: int
) -> None:
    """Rows in any order, behind them garbage: each lane's place is its rank among those of its expert."""
    generator = torch.Generator().manual_seed(seed)
    tokens = rows + 3
    sources = torch.full((rows + spare,), -(2**30), dtype=torch.int32)
    sources[:rows] = torch.randperm(tokens, generator=generator)[:rows].int()
    ids = torch.full((rows + spare, lanes), 2**40, dtype=torch.int64)
    for row in range(rows):
        chosen = torch.randperm(experts, generator=generator)[:lanes]
        ids[row] = -1
        ids[row, : len(chosen)] = chosen.where(torch.rand(len(chosen), generator=generator) < 0.7, -1)
    found = ordered_lanes(ids, sources, torch.tensor(rows, dtype=torch.int32), experts, tokens)
    starts = torch.arange(experts) * 100
    slots = found.slots(starts)
    assert bool((slots[rows:] == -1).all())
    for expert in range(experts):
        mine = [(int(sources[row]), int(slots[row, lane])) for row, lane in (ids[:rows] == expert).nonzero()]
        assert int(found.counts[expert]) == len(mine)
        assert [slot for _, slot in sorted(mine)] == [100 * expert + place for place in range(len(mine))]
    assert int((slots >= 0).sum()) == int(found.counts.sum())


@pytest.mark.parametrize("fp8", [False, True])
def test_copies(fp8: bool) -> None:
    """Every lane gets its row, weight and scales; other places stay as they were."""
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(40, generator=generator)[:27].view(9, 3).int()
    slots[torch.rand(9, 3, generator=generator) < 0.3] = -1
    codes = torch.randint(0, 120, (9, 512), generator=generator)
    rows = codes.to(torch.uint8).view(torch.float8_e4m3fn) if fp8 else codes.bfloat16()
    weights = torch.rand(9, 3, generator=generator)
    scales = torch.rand(9, 4, generator=generator) if fp8 else None
    copiers = [copy_lanes]
    if importlib.util.find_spec("triton") is not None:
        import triton

        if triton.knobs.runtime.interpret:
            from interlock.moe.a2a.deepep_v2.row_copies_triton import launch

            copiers.append(launch)
    for copy in copiers:
        target = Target(
            torch.zeros(40, 512, dtype=torch.uint8).view(rows.dtype)
            if fp8
            else torch.zeros(40, 512).bfloat16(),
            torch.zeros(40),
            torch.zeros(40, 4) if fp8 else None,
        )
        copy(slots, rows, weights, scales, target)
        left = set(range(40))
        for source, lane in (slots >= 0).nonzero().tolist():
            at = int(slots[source, lane])
            left.discard(at)
            assert torch.equal(target.rows.view(torch.uint8)[at], rows.view(torch.uint8)[source])
            assert target.weights[at] == weights[source, lane]
            if scales is not None and target.scales is not None:
                assert torch.equal(target.scales[at], scales[source])
        assert not bool(target.weights[sorted(left)].any())
