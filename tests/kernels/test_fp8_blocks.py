"""Block-scaled fp8 weights: slices, stacks, padding, and the W8A8 linear of the reference kernels."""

from __future__ import annotations

import pytest
import torch

from interlock.kernels.availability import native_cpu_unavailable
from interlock.kernels.fp8_blocks import BLOCK, Fp8Blocks, stack_rows
from interlock.kernels.torch_reference import TorchKernels


def random_blocks(rows: int, columns: int, seed: int = 0) -> Fp8Blocks:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-3, 3, columns)
    return Fp8Blocks.quantised(torch.randn(rows, columns, generator=generator) * spread)


@pytest.mark.parametrize(
    ("rows", "columns"), [(range(128, 256), range(384)), (range(256, 300), range(128, 384))]
)
def test_slices_that_begin_with_a_block_are_slices_of_the_values(rows: range, columns: range) -> None:
    blocks = random_blocks(300, 384)
    part = blocks.rows(rows).columns(columns)
    whole = blocks.dequantised(torch.float32)
    assert torch.equal(
        part.dequantised(torch.float32), whole[rows.start : rows.stop, columns.start : columns.stop]
    )


def test_slices_within_a_block_are_refused() -> None:
    blocks = random_blocks(256, 256)
    with pytest.raises(ValueError, match="rows 64 to 192 do not begin with a block of 128"):
        blocks.rows(range(64, 192))
    with pytest.raises(ValueError, match="columns 1 to 129"):
        blocks.columns(range(1, 129))
    with pytest.raises(ValueError, match="100 rows of block-fp8 weights"):
        stack_rows([random_blocks(100, 128), random_blocks(128, 128)])


def test_stacks_and_padding_keep_every_value() -> None:
    parts = [random_blocks(256, 200, seed=1), random_blocks(100, 200, seed=2)]
    stacked = stack_rows(parts).padded(512, 256)
    expected = torch.cat([part.dequantised(torch.float32) for part in parts])
    assert stacked.scales.shape == (4, 2)
    values = stacked.dequantised(torch.float32)
    assert torch.equal(values[:356, :200], expected)
    assert not values[356:].any()
    assert not values[:, 200:].any()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_linear_is_w8a8(rows: int) -> None:
    """Against float64 products of the quantised values, one group of 128 channels after the other."""
    blocks, kernels = random_blocks(300, 384), TorchKernels()
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    packed = kernels.pack_linear_fp8(blocks.values, blocks.scales)
    assert (packed.out_features, packed.in_features, packed.dtype) == (300, 384, torch.float8_e4m3fn)
    exact = torch.zeros(rows, 300, dtype=torch.float64)
    for first in range(0, 384, BLOCK):
        group = x[:, first : first + BLOCK].double()
        scale = group.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
        quantised = (group / scale).float().to(torch.float8_e4m3fn).double()
        part = blocks.columns(range(first, first + BLOCK)).dequantised(torch.float32).double()
        exact += scale * (quantised @ part.T)
    got = kernels.linear(x, packed, out_dtype=torch.float32)
    torch.testing.assert_close(
        got.double(), exact, rtol=2e-3, atol=1e-3 * float(exact.abs().max()) if rows else 0
    )
    assert kernels.linear(x, packed).dtype == torch.bfloat16


def test_a_float_weight_is_quantised_while_packing() -> None:
    kernels = TorchKernels()
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(4))
    packed = kernels.pack_linear_fp8(weight)
    error = (packed.data.dequantised(torch.float32) - weight).abs().max()
    assert float(error) <= float(weight.abs().max()) / 16
    assert packed.nbytes == 128 * 256 + 2 * 4


def test_the_native_kernels_say_that_they_compute_no_fp8() -> None:
    if (problem := native_cpu_unavailable()) is not None:
        pytest.skip(problem)
    from interlock.kernels.cpu.kernels import CpuKernels

    blocks = random_blocks(128, 128)
    with pytest.raises(TypeError, match="dequantise fp8 blocks first"):
        CpuKernels(threads=1).pack_linear_fp8(blocks.values, blocks.scales)
