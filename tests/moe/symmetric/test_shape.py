"""Where everything lies in a rank's memory, and that it holds whatever the contract allows to arrive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from interlock.moe.a2a.backend import BufferShape
from interlock.moe.a2a.symmetric import BACKEND
from interlock.moe.a2a.symmetric.shape import GRANULARITY, SECTIONS, RegionShape
from interlock.moe.terms import Layout, Phase

shapes = st.builds(
    lambda ranks, experts, top_k, groups, fp8, prefill, decode, layouts, alignment: BufferShape(
        ranks=ranks,
        num_experts=max(ranks, experts),
        top_k=min(top_k, max(ranks, experts)),
        hidden_size=16 * groups,
        row_bytes=16 * groups * (1 if fp8 else 2),
        scale_bytes=4 * -(-16 * groups // 128) if fp8 else 0,
        result_bytes=32 * groups,
        capacity={Phase.PREFILL: prefill, Phase.DECODE: decode},
        layouts=dict(zip(Phase, layouts, strict=True)),
        alignment=alignment,
    ),
    ranks=st.integers(1, 64),
    experts=st.integers(1, 512),
    top_k=st.integers(1, 9),
    groups=st.integers(1, 48),
    fp8=st.booleans(),
    prefill=st.integers(1, 5000),
    decode=st.integers(1, 300),
    layouts=st.tuples(*[st.sampled_from((Layout.CONTIGUOUS, Layout.MASKED))] * 2),
    alignment=st.sampled_from((1, 4, 128)),
)


@given(shapes)
def test_sections_lie_apart_and_where_16_bytes_can_be_read(shape: BufferShape) -> None:
    region = RegionShape.of(shape)
    sizes, offsets = region.sizes(), region.offsets()
    end = 0
    for name in SECTIONS:
        assert offsets[name] >= end
        assert offsets[name] % 128 == 0
        end = offsets[name] + sizes[name]
    assert end <= region.region_bytes < end + GRANULARITY + 128 * len(SECTIONS)
    assert region.region_bytes % GRANULARITY == 0
    assert BACKEND.buffer_bytes(shape) == region.region_bytes + region.private_bytes


@given(shapes, st.data())
def test_whatever_may_arrive_has_room(shape: BufferShape, data: st.DataObject) -> None:
    """Any number of lanes for each expert that all ranks at capacity can send, each segment aligned."""
    rows = RegionShape.of(shape).slab_rows
    local = -(-shape.num_experts // shape.ranks)
    for phase in Phase:
        most = shape.ranks * shape.capacity[phase]
        if shape.layouts[phase] is Layout.MASKED:
            assert local * most <= rows
            continue
        left = most * min(shape.top_k, local)
        total = 0
        for _ in range(local):
            count = data.draw(st.one_of(st.just(1), st.integers(0, most)))
            count = min(count, left, most)
            left -= count
            total += -(-count // shape.alignment) * shape.alignment
            if total > rows:
                break
        assert total <= rows
