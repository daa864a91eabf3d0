"""The cache tensors: separate widths of keys and values, page spaces, refusals."""

from __future__ import annotations

import msgspec
import pytest
import torch

from interlock.errors import StartupError
from interlock.kv.cache import allocate
from interlock.kv.store import Geometry, PageStore
from interlock.plan.launch_plan import MemoryEstimate
from tests.engine.simulation import sim_plan


def widths_plan(**overrides: object):
    plan = sim_plan((None, 8), page_size=4, full_pages=9, window_pages=5, **overrides)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            attention=msgspec.structs.replace(
                layer.attention, head_dim=24, v_head_dim=16, num_kv_heads=heads, num_heads=8
            ),
        )
        for layer, heads in zip(plan.card.layers, (2, 4), strict=True)
    )
    return msgspec.structs.replace(plan, card=msgspec.structs.replace(plan.card, layers=layers))


def test_shapes_follow_each_layers_own_card() -> None:
    """E02, E03: key and value widths, heads and page space of each layer; bytes per token exact."""
    cache = allocate(widths_plan(), "cpu")
    assert cache.layers[0].k.shape == (9, 4, 2, 24)
    assert cache.layers[0].v.shape == (9, 4, 2, 16)
    assert cache.layers[1].k.shape == (5, 4, 4, 24)
    assert cache.layers[1].v.shape == (5, 4, 4, 16)
    assert cache.nbytes == 4 * (9 * 4 * 2 + 5 * 4 * 4) * (24 + 16)
    assert all(not tensor.any() for layer in cache.layers for tensor in (layer.k, layer.v))


def test_rows_written_in_shuffled_slots_read_back() -> None:
    """E02: token i's key i and value -i, in shuffled pages, do not touch each other."""
    cache = allocate(widths_plan(), "cpu").layers[0]
    slots = torch.randperm(36)
    values = torch.arange(36.0)
    cache.k.view(36, 2, 24)[slots] = values[:, None, None].expand(36, 2, 24)
    cache.v.view(36, 2, 16)[slots] = -values[:, None, None].expand(36, 2, 16)
    assert torch.equal(cache.k.view(36, 2, 24)[slots, 1, 23], values)
    assert torch.equal(cache.v.view(36, 2, 16)[slots, 0, 0], -values)


@pytest.mark.parametrize(("tp", "heads"), [(1, (2, 4)), (2, (1, 2)), (4, (1, 1)), (8, (1, 1))])
def test_heads_are_split_or_replicated_over_ranks(tp: int, heads: tuple[int, int]) -> None:
    cache = allocate(widths_plan(tp_size=tp), "cpu")
    assert tuple(layer.k.shape[2] for layer in cache.layers) == heads


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"kv_cache_dtype": "int4"}, "int4"),
        ({"page_size": 0}, "page_size is 0"),
        ({"tp_size": 3}, "2 key-value heads cannot be spread over 3"),
        (
            {
                "memory": MemoryEstimate(
                    weights=0, kv_full=0, kv_window=0, a2a_buffers=0, activations=0, available=1000
                )
            },
            "1000 are available",
        ),
    ],
)
def test_impossible_caches_are_refused_before_allocation(overrides: dict[str, object], text: str) -> None:
    plan = msgspec.structs.replace(widths_plan(), **overrides)
    with pytest.raises(StartupError, match=text):
        allocate(plan, "cpu")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"full_pages": 0}, "full_pages is 0"),
        ({"window_pages": 2}, "window of 8 keys in pages of 4 needs at least 3"),
        ({"window_pages": 3, "sliding_window_extra": 1}, "window of 9 keys in pages of 4 needs at least 4"),
    ],
)
def test_page_spaces_that_cannot_hold_one_token_are_refused(overrides: dict[str, int], text: str) -> None:
    plan = sim_plan((None, 8), **overrides)
    with pytest.raises(StartupError, match=text):
        PageStore(Geometry.of(plan), prefix_cache=True)
