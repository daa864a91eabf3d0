"""Norms, gated activation, rotary embedding with the cache write, sum over lanes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import DTYPES, REFERENCE, close, cpu, normal, same_bits

WIDTHS = (1, 7, 16, 33, 576)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5, 300])
def test_rms_norm(n: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for h in WIDTHS:
        x, weight = normal(n, h, dtype=dtype), normal(h, dtype=weight_dtype, seed=1)
        actual = cpu(2).rms_norm(x, weight, 1e-6)
        assert actual.dtype == dtype
        close(actual, REFERENCE.rms_norm(x, weight, 1e-6))
        total = normal(n, h, dtype=dtype, seed=2)
        normed, summed = cpu(2).add_rms_norm(x, total, weight, 1e-6)
        assert same_bits(summed, x + total)
        assert same_bits(normed, cpu().rms_norm(summed, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_a_fused_projection(dtype: torch.dtype) -> None:
    qkv, weight = normal(6, 3 * 4 * 24, dtype=dtype), normal(24, dtype=dtype, seed=1)
    heads = qkv[:, 96:192].view(6, 4, 24)
    assert cpu().rms_norm(qkv.view(2, 3, 12, 24), weight, 1e-5).shape == (2, 3, 12, 24)
    assert same_bits(cpu().rms_norm(heads, weight, 1e-5), cpu().rms_norm(heads.contiguous(), weight, 1e-5))
    close(cpu().rms_norm(heads, weight, 1e-5), REFERENCE.rms_norm(heads, weight, 1e-5))
    assert same_bits(cpu().rms_norm(heads[0, 0], weight, 1e-5), cpu().rms_norm(heads, weight, 1e-5)[0, 0])


def test_rms_norm_of_extreme_rows() -> None:
    x = torch.stack(
        [torch.zeros(40), torch.full((40,), 1e-30), torch.full((40,), 1e15), torch.full((40,), torch.nan)]
    )
    close(cpu().rms_norm(x, torch.ones(40), 1e-6), REFERENCE.rms_norm(x, torch.ones(40), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 70])
def test_silu_and_mul(n: int, dtype: torch.dtype) -> None:
    for i in WIDTHS:
        gate_up = normal(n, 2 * i, dtype=dtype, scale=4)
        close(cpu(2).silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.double()))


def test_silu_at_the_ends() -> None:
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, 20, 88, 89, 104, 1e30, -20, -88, -89, -104, -1e30, torch.inf, torch.nan]
    )
    gate_up = torch.stack([gate, torch.ones_like(gate)]).reshape(1, -1)
    actual = cpu().silu_and_mul(gate_up)
    close(actual, REFERENCE.silu_and_mul(gate_up), atol=1e-36)


def rope_inputs(n: int, dtype: torch.dtype, cache_dtype: torch.dtype, hd: int, vd: int, rotary: int) -> dict:
    qkv = normal(n, 4 * hd + 2 * hd + 2 * vd, dtype=dtype)
    angles = torch.rand(50, rotary // 2, generator=torch.Generator().manual_seed(1)) * 6
    slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(2))[:n].contiguous()
    slots[1::4] = -1
    return {
        "q": qkv[:, : 4 * hd].view(n, 4, hd),
        "k": qkv[:, 4 * hd : 6 * hd].view(n, 2, hd),
        "v": qkv[:, 6 * hd :].view(n, 2, vd),
        "positions": torch.arange(n) * 7 % 50,
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1),
        "k_cache": torch.full((5, 16, 2, hd), 99.0, dtype=cache_dtype),
        "v_cache": torch.full((5, 16, 2, vd), 99.0, dtype=cache_dtype),
        "slots": slots,
        "value_scale": 0.7,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 9, 60])
@pytest.mark.parametrize(("hd", "vd", "rotary"), [(64, 64, 64), (192, 128, 64), (24, 16, 10), (8, 8, 0)])
def test_rope_and_store(
    n: int, dtype: torch.dtype, cache_dtype: torch.dtype, hd: int, vd: int, rotary: int
) -> None:
    native, reference = (rope_inputs(n, dtype, cache_dtype, hd, vd, rotary) for _ in range(2))
    q = cpu(2).rope_and_store(**native)
    assert q.dtype == dtype
    assert q.is_contiguous()
    close(q, REFERENCE.rope_and_store(**reference))
    close(native["k_cache"], reference["k_cache"])
    close(native["v_cache"], reference["v_cache"])
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[native["slots"][native["slots"] >= 0]] = False
    assert (native["k_cache"].flatten(0, 1)[untouched] == 99).all()


def test_rope_refuses_what_lies_outside() -> None:
    inputs = rope_inputs(4, torch.float32, torch.float32, 8, 8, 8)
    with pytest.raises(ValueError, match=r"^positions:"):
        cpu().rope_and_store(**inputs | {"positions": torch.tensor([0, 1, 50, 2])})
    with pytest.raises(ValueError, match=r"^slots:"):
        cpu().rope_and_store(**inputs | {"slots": torch.tensor([0, 1, 80, 2])})
    with pytest.raises(ValueError, match=r"^k:"):
        cpu().rope_and_store(**inputs | {"k": inputs["q"]})
    with pytest.raises(ValueError, match=r"^positions:"):
        cpu().rope_and_store(**inputs | {"positions": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"^v_cache:"):
        cpu().rope_and_store(**inputs | {"v_cache": inputs["v_cache"].bfloat16()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(0, 3), (1, 1), (6, 12), (90, 8)])
def test_sum_lanes_in_order_and_skipping(n: int, k: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for h in WIDTHS:
        rows = normal(n, k, h, dtype=dtype)
        ids = torch.arange(k).expand(n, k).contiguous()
        ids[::2, k // 2] = -1
        rows[::2, k // 2] = float("nan")
        if n > 2:
            ids[2], rows[2] = -1, float("nan")
        actual = cpu(2).sum_lanes(rows, ids, out_dtype)
        assert same_bits(actual, REFERENCE.sum_lanes(rows, ids, out_dtype))
        assert not actual.isnan().any()


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), h=st.integers(1, 130), threads=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_do_not_depend_on_their_batch(n: int, h: int, threads: int, seed: int) -> None:
    x, weight = normal(n, 2 * h, seed=seed), normal(2 * h, seed=seed + 1)
    many = cpu(threads)
    for row in range(n):
        one = x[row : row + 1]
        assert same_bits(many.rms_norm(x, weight, 1e-6)[row : row + 1], cpu().rms_norm(one, weight, 1e-6))
        assert same_bits(many.silu_and_mul(x)[row : row + 1], cpu().silu_and_mul(one))
