"""How dimensions and heads are cut over ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import StartupError
from interlock.kv.cache import local_kv_heads
from interlock.parallel.sharding import shard, shard_heads
from interlock.plan.card import AttentionCard


def attention(heads: int, kv_heads: int) -> AttentionCard:
    return AttentionCard(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=24, v_head_dim=16, rope_theta=1e4, rotary_dim=8
    )


@given(st.integers(1, 500), st.integers(1, 16))
def test_shards_cover_a_dimension_once(total: int, parts: int) -> None:
    pieces = [shard(total, parts, index) for index in range(parts)]
    assert [place for piece in pieces for place in piece.live] == list(range(total))
    assert len({piece.size for piece in pieces}) == 1
    assert all(piece.padding >= 0 for piece in pieces)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4, 8, 16]))
def test_each_rank_has_the_kv_heads_its_queries_read(kv_heads: int, group: int, parts: int) -> None:
    """E10, H01: one function of the rank for weights, sinks and cache; q heads are global numbers."""
    card = attention(kv_heads * group, kv_heads)
    if card.num_heads % parts:
        with pytest.raises(StartupError, match="cannot be cut"):
            shard_heads(card, parts, 0)
        return
    shards = [shard_heads(card, parts, index) for index in range(parts)]
    assert [head for one in shards for head in one.q] == list(range(card.num_heads))
    for one in shards:
        assert {head // group for head in one.q} == set(one.kv)
        assert len(one.kv) == local_kv_heads(card, parts)


def test_sizes_that_do_not_divide_say_which_do() -> None:
    """A11: 64 heads cannot be cut in 3."""
    with pytest.raises(StartupError, match="possible: 1, 2, 4, 8, 16, 32, 64"):
        shard_heads(attention(64, 4), 3, 0)
