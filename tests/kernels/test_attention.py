"""Paged attention: against float64, poison that must not leak, and bit equality across chunks and batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DTYPES, PagedCase, close, cpu, paged_case, same_bits

SHAPES = [(6, 2, 64, 64), (4, 1, 192, 128), (16, 1, 24, 40), (3, 3, 7, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_against_float64(shape: tuple[int, int, int, int], window: int | None, sinks: bool) -> None:
    nh, kvh, hd, vd = shape
    lengths = [(1, 1), (1, 100), (7, 7), (45, 80), (0, 3)]
    case = paged_case(lengths, nh=nh, kvh=kvh, hd=hd, vd=vd, window=window, sinks=sinks, padding=3)
    actual = case.run(cpu(2))
    assert (actual[-3:] == 0).all()
    close(actual, case.in_float64(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 8, 48, 64])
def test_dtypes_and_page_sizes(dtype: torch.dtype, cache_dtype: torch.dtype, page_size: int) -> None:
    case = paged_case(
        [(3, 50), (20, 33)], dtype=dtype, cache_dtype=cache_dtype, page_size=page_size, window=30, sinks=True
    )
    actual = case.run(cpu(2))
    assert actual.dtype == dtype
    close(actual, case.in_float64())


def test_no_sequences_gives_zeros() -> None:
    """E12: a row that sees no key gives zeros, never NaN."""
    case = paged_case([], padding=4)
    assert (case.run(cpu()) == 0).all()
    assert paged_case([]).run(cpu()).shape == (0, 6, 32)


@pytest.mark.parametrize("q_scale", [1e-30, 300.0, 1e6])
@pytest.mark.parametrize("sink", [None, -1e30, -float("inf"), 0.0, 1e4])
def test_huge_scores_and_sinks(q_scale: float, sink: float | None) -> None:
    case = paged_case([(10, 70), (1, 33)], q_scale=q_scale)
    if sink is not None:
        case.sinks = torch.full((6,), sink)
    actual = case.run(cpu())
    assert actual.isfinite().all()
    exact = case.in_float64()
    torch.testing.assert_close(actual.double(), exact, rtol=1e-3, atol=1e-3 if q_scale < 1e5 else 0.7)


def part(case: PagedCase, sequence: int, begin: int, end: int) -> PagedCase:
    """Queries [begin, end) of one sequence, as an earlier step would have run them."""
    start = int(case.query_start[sequence])
    behind = int(case.query_start[sequence + 1]) - start - end
    return PagedCase(
        q=case.q[start + begin : start + end],
        k_cache=case.k_cache,
        v_cache=case.v_cache,
        page_table=case.page_table[sequence : sequence + 1],
        query_start=torch.tensor([0, end - begin], dtype=torch.int32),
        kv_len=case.kv_len[sequence : sequence + 1] - behind,
        scale=case.scale,
        window=case.window,
        sinks=case.sinks,
    )


@settings(max_examples=50, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    window=st.sampled_from([None, 1, 3, 17, 32, 64]),
    sinks=st.booleans(),
    page_size=st.sampled_from([4, 16, 64]),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_bits_do_not_depend_on_chunks_batch_or_threads(
    shape: tuple[int, int, int, int],
    window: int | None,
    sinks: bool,
    page_size: int,
    threads: int,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    nh, kvh, hd, vd = shape
    queries = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    lengths = [(count, count + data.draw(st.integers(0, 70))) for count in queries]
    case = paged_case(
        lengths,
        nh=nh,
        kvh=kvh,
        hd=hd,
        vd=vd,
        window=window,
        sinks=sinks,
        page_size=page_size,
        dtype=dtype,
        seed=seed,
    )
    whole = case.run(cpu(threads))
    for sequence, count in enumerate(queries):
        cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
        pieces = [part(case, sequence, low, high).run(cpu()) for low, high in pairwise(cuts)]
        start = int(case.query_start[sequence])
        assert same_bits(torch.cat(pieces), whole[start : start + count])


def test_later_keys_of_the_same_chunk_do_not_leak() -> None:
    case = paged_case([(40, 40)])
    clean = case.run(cpu())
    page, offset = int(case.page_table[0, 25 // 16]), 25 % 16
    case.k_cache[page, offset] = float("nan")
    case.v_cache[page, offset] = float("inf")
    poisoned = case.run(cpu())
    assert same_bits(poisoned[:25], clean[:25])
    assert poisoned[25:].isnan().all()


def test_keys_behind_the_window_do_not_leak() -> None:
    case = paged_case([(40, 40)], window=9)
    clean = case.run(cpu())
    page, offset = int(case.page_table[0, 20 // 16]), 20 % 16
    case.k_cache[page, offset] = float("nan")
    case.v_cache[page, offset] = float("nan")
    poisoned = case.run(cpu())
    healthy = [*range(20), *range(29, 40)]
    assert same_bits(poisoned[healthy], clean[healthy])
    assert poisoned[20:29].isnan().all()


def test_strided_queries() -> None:
    case = paged_case([(5, 20)])
    expected = case.run(cpu())
    wide = torch.zeros(5, 9, 50)
    wide[:, 2:8, 10:42] = case.q
    case.q = wide[:, 2:8, 10:42]
    assert same_bits(case.run(cpu()), expected)


def test_wrong_tables_are_named() -> None:
    def call(**change: object) -> None:
        case = paged_case([(2, 40)])
        for name, value in change.items():
            setattr(case, name, value)
        case.run(cpu())

    with pytest.raises(ValueError, match=r"^page_table: a page"):
        call(page_table=torch.full((1, 4), -1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^page_table: a page"):
        call(page_table=torch.full((1, 4), 1000, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^kv_len:"):
        call(kv_len=torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^kv_len:"):
        call(kv_len=torch.tensor([4000], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^query_start:"):
        call(query_start=torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^window:"):
        call(window=0)
    with pytest.raises(ValueError, match=r"^kv_len: must be a contiguous torch\.int32"):
        call(kv_len=torch.tensor([40]))
