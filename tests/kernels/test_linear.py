"""Linear layers: against float64, and the promise that a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DTYPES, REFERENCE, close, cpu, normal, same_bits


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 13, 97, 200])
def test_linear_is_the_product_rounded_once(n: int, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for out_features, in_features in ((1, 1), (33, 7), (96, 300), (70, 530)):
        x = normal(n, in_features, dtype=x_dtype)
        weight = normal(out_features, in_features, dtype=w_dtype, seed=1, scale=in_features**-0.5)
        exact = x.double() @ weight.double().T
        packed = cpu(2).pack_linear(weight)
        for out_dtype in (None, torch.float32, torch.bfloat16):
            actual = cpu(2).linear(x, packed, out_dtype=out_dtype)
            assert actual.dtype == (out_dtype or x_dtype)
            close(actual, exact)
            close(REFERENCE.linear(x, REFERENCE.pack_linear(weight), out_dtype=out_dtype), exact)


def test_output_is_rounded_to_nearest_even_like_torch() -> None:
    x = torch.randint(0, 2**31, (4096, 1), dtype=torch.int32).view(torch.float32)
    x[:4, 0] = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38])
    actual = cpu().linear(x, cpu().pack_linear(torch.ones(1, 1)), out_dtype=torch.bfloat16)
    finite = torch.isfinite(x[:, 0])
    assert same_bits(actual[finite], x[finite].to(torch.bfloat16))
    assert torch.equal(actual.isnan(), x.isnan())


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_every_batch(x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    weight = normal(75, 600, dtype=w_dtype, seed=1)
    packed = cpu().pack_linear(weight)
    x = normal(140, 600, dtype=x_dtype)
    alone = torch.cat([cpu().linear(x[row : row + 1], packed) for row in range(len(x))])
    for n in [*range(1, 65), 95, 96, 97, 100, 140]:
        for threads in (1, 2, 3):
            assert same_bits(cpu(threads).linear(x[:n], packed), alone[:n])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 130),
    in_features=st.integers(1, 700),
    out_features=st.integers(1, 150),
    threads=st.integers(1, 4),
    data=st.data(),
)
def test_bits_do_not_depend_on_batch_place_threads_or_columns(
    n: int, in_features: int, out_features: int, threads: int, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 1000))
    x_dtype, w_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    weight = normal(out_features, in_features, dtype=w_dtype, seed=seed)
    x = normal(n, in_features, dtype=x_dtype, seed=seed + 1)
    whole = cpu(1).linear(x, cpu().pack_linear(weight))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert same_bits(cpu(threads).linear(x[order], cpu().pack_linear(weight)), whole[order])
    first = data.draw(st.integers(0, out_features - 1))
    last = data.draw(st.integers(first + 1, out_features))
    sliced = cpu(threads).linear(x, cpu().pack_linear(weight[first:last]))
    assert same_bits(sliced, whole[:, first:last].contiguous())


def test_a_poisoned_row_leaves_its_neighbours_alone() -> None:
    packed = cpu().pack_linear(normal(40, 50, seed=1))
    x = normal(14, 50)
    clean = cpu().linear(x, packed)
    x[5] = float("nan")
    x[9] = float("inf")
    rows = [row for row in range(14) if row not in (5, 9)]
    assert same_bits(cpu().linear(x, packed)[rows], clean[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_and_weights(dtype: torch.dtype) -> None:
    wide, wide_weight = normal(9, 100, dtype=dtype), normal(50, 80, dtype=dtype, seed=1)
    x, weight = wide[:, 20:60], wide_weight[5:38, 10:50]
    expected = cpu().linear(x.contiguous(), cpu().pack_linear(weight.contiguous()))
    assert same_bits(cpu().linear(x, cpu().pack_linear(weight)), expected)


def test_identity_weight_returns_the_rows() -> None:
    """A packing that misplaced one element would show."""
    for dtype in DTYPES:
        x = normal(20, 133, dtype=dtype)
        assert torch.equal(cpu().linear(x, cpu().pack_linear(torch.eye(133, dtype=dtype))), x)


def test_packed_size_is_what_is_held() -> None:
    packed = cpu().pack_linear(torch.zeros(33, 10))
    assert (packed.out_features, packed.in_features, packed.dtype) == (33, 10, torch.float32)
    assert packed.nbytes == 64 * 10 * 4


def test_wrong_arguments_are_named() -> None:
    packed = cpu().pack_linear(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"^x: must be \[n, 8\]"):
        cpu().linear(torch.zeros(2, 7), packed)
    with pytest.raises(ValueError, match=r"^x: .*float32 or bfloat16"):
        cpu().linear(torch.zeros(2, 8, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match=r"^x: .*dense last dimension"):
        cpu().linear(torch.zeros(8, 2).T, packed)
    with pytest.raises(ValueError, match=r"^weight: "):
        cpu().pack_linear(torch.zeros(4, 8, dtype=torch.float16))
