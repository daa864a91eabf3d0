"""Expert MLP: against the loop in float64, nasty distributions, bit equality across ways of computing it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kernels.base import ExpertRows
from tests.kernels.cases import DTYPES, REFERENCE, close, cpu, expert_rows, normal, same_bits


def weights(
    experts: int, h: int, i: int, dtype: torch.dtype, seed: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = normal(experts, 2 * i, h, dtype=dtype, seed=seed, scale=h**-0.5)
    return gate_up, normal(experts, h, i, dtype=dtype, seed=seed + 1, scale=i**-0.5)


COUNTS = {
    "nothing": [0, 0, 0, 0],
    "one row": [0, 0, 1, 0],
    "decode": [1, 1, 0, 2],
    "all to one": [0, 50, 0, 0],
    "uneven": [3, 0, 14, 97],
    "many": [100, 200, 1, 13],
}


@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_expert_mlp_is_the_loop(case: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    counts = COUNTS[case]
    for h, i in ((64, 32), (50, 19), (128, 72)):
        gate_up, down = weights(4, h, i, w_dtype)
        x = normal(23, h, dtype=x_dtype)
        rows = expert_rows(counts, 23, sum(counts) + 5)
        for out_dtype in {torch.float32, x_dtype}:
            out, expected = (torch.full((sum(counts) + 5, h), 7.0, dtype=out_dtype) for _ in range(2))
            cpu(2).expert_mlp(x, cpu().pack_experts(gate_up, down), rows, out)
            REFERENCE.expert_mlp(x, REFERENCE.pack_experts(gate_up, down), rows, expected)
            if x_dtype == torch.bfloat16:
                close(out, expected, rtol=2e-2, atol=2e-2)
            else:
                close(out, expected, atol=2e-2 if out_dtype == torch.bfloat16 else 1e-5)
            untouched = torch.ones(len(out), dtype=torch.bool)
            untouched[rows.target] = False
            assert (out[untouched] == 7).all()


def test_against_float64() -> None:
    gate_up, down = weights(3, 576, 128, torch.float32)
    x, rows = normal(16, 576), expert_rows([5, 0, 11], 16, 16)
    out, exact = torch.zeros(16, 576), torch.zeros(16, 576, dtype=torch.float64)
    cpu(2).expert_mlp(x, cpu().pack_experts(gate_up, down), rows, out)
    wide = ExpertRows(rows.offsets, rows.source, rows.target, rows.weight.double())
    REFERENCE.expert_mlp(x.double(), REFERENCE.pack_experts(gate_up.double(), down.double()), wide, exact)
    close(out, exact, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 1, 2, 5, 13, 40, 110]), min_size=1, max_size=6),
    h=st.integers(1, 100),
    i=st.integers(1, 80),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_a_row_has_the_bits_of_computing_it_alone(
    counts: list[int], h: int, i: int, threads: int, dtype: torch.dtype, seed: int
) -> None:
    gate_up, down = weights(len(counts), h, i, dtype, seed)
    packed = cpu().pack_experts(gate_up, down)
    total = sum(counts)
    x, rows = normal(9, h, dtype=dtype, seed=seed), expert_rows(counts, 9, total + 1, seed)
    together = torch.zeros(total + 1, h, dtype=dtype)
    cpu(threads).expert_mlp(x, packed, rows, together)
    for row in range(0, total, 7):
        expert = int(torch.searchsorted(rows.offsets, row, right=True)) - 1
        offsets = (torch.arange(len(counts) + 1) > expert).long()
        single = ExpertRows(
            offsets, *(part[row : row + 1] for part in (rows.source, rows.target, rows.weight))
        )
        alone = torch.zeros(total + 1, h, dtype=dtype)
        cpu().expert_mlp(x, packed, single, alone)
        target = int(rows.target[row])
        assert same_bits(together[target], alone[target])


def test_an_expert_has_the_same_bits_on_any_rank() -> None:
    gate_up, down = weights(6, 40, 24, torch.float32)
    x, rows = normal(8, 40), expert_rows([2, 3, 1, 0, 4, 2], 8, 12)
    whole, parts = torch.zeros(12, 40), torch.zeros(12, 40)
    cpu().expert_mlp(x, cpu().pack_experts(gate_up, down), rows, whole)
    for first in (0, 2, 4):
        low, high = int(rows.offsets[first]), int(rows.offsets[first + 2])
        local = ExpertRows(
            rows.offsets[first : first + 3] - low,
            rows.source[low:high],
            rows.target[low:high],
            rows.weight[low:high],
        )
        local_experts = cpu().pack_experts(gate_up[first : first + 2], down[first : first + 2])
        cpu().expert_mlp(x, local_experts, local, parts)
    assert same_bits(whole, parts)


def test_poison_in_unlisted_rows_and_neighbours_does_not_leak() -> None:
    gate_up, down = weights(2, 48, 40, torch.float32)
    packed, rows = cpu().pack_experts(gate_up, down), expert_rows([9, 6], 10, 15)
    x = normal(10, 48)
    clean, dirty = torch.zeros(15, 48), torch.zeros(15, 48)
    cpu().expert_mlp(x, packed, rows, clean)
    x[3] = float("nan")
    cpu().expert_mlp(x, packed, rows, dirty)
    healthy = rows.target[rows.source != 3]
    assert same_bits(clean[healthy], dirty[healthy])


def test_activations_are_bounded_by_groups_of_blocks() -> None:
    """More rows x width than the scratch of one group holds (2^24 floats) gives the same rows."""
    i = 2**19
    gate_up, down = weights(1, 2, i, torch.float32)
    packed = cpu().pack_experts(gate_up, down)
    x, rows = normal(3, 2), expert_rows([100], 3, 100)
    out = torch.zeros(100, 2)
    cpu(2).expert_mlp(x, packed, rows, out)
    for source in range(3):
        same = out[rows.target[rows.source == source]] / rows.weight[rows.source == source, None]
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-6, atol=0)


def test_wrong_rows_are_named() -> None:
    packed = cpu().pack_experts(*weights(2, 8, 4, torch.float32))
    x, good = normal(3, 8), expert_rows([1, 2], 3, 3)
    out = torch.zeros(3, 8)

    def call(**change: torch.Tensor) -> None:
        parts = {name: getattr(good, name) for name in ("offsets", "source", "target", "weight")}
        cpu().expert_mlp(x, packed, ExpertRows(**parts | change), out)

    with pytest.raises(ValueError, match=r"^rows\.source: names"):
        call(source=torch.tensor([0, 3, 1]))
    with pytest.raises(ValueError, match=r"^rows\.target: names"):
        call(target=torch.tensor([0, -1, 1]))
    with pytest.raises(ValueError, match=r"^rows\.offsets: must begin"):
        call(offsets=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match=r"^rows\.weight: must be a contiguous torch\.float32"):
        call(weight=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^out:"):
        cpu().expert_mlp(x, packed, good, torch.zeros(3, 9))
    assert (out == 0).all()
