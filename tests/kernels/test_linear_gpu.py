"""Every kernel of a dense linear against what its operands stand for, on a CUDA device (``pytest -m
gpu``)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from interlock.kernels.triton.row_blocks import reference_quantise
from interlock.kernels.triton.tuned_linear import LinearConfig, Simple, Stream, Tiles
from tests.kernels.triton_cases import relative

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16

FP8: dict[str, LinearConfig] = {
    "simple": Simple(16, 64, 1, 4, 4),
    "simple-split": Simple(64, 128, 2, 4, 8),
    "stream": Stream(16, 64, 4, 2, 1, 2, True),
    "stream-pairs": Stream(16, 64, 2, 5, 1, 2, True),
    "stream-wide": Stream(32, 128, 2, 5, 1, 1, True),
    "stream-split": Stream(16, 64, 4, 4, 2, 1, True),
    "stream-rows-first": Stream(16, 32, 4, 2, 1, 2, False),
    "stream-64-rows": Stream(64, 128, 2, 4, 1, 1, False),
    "stream-early": Stream(16, 64, 4, 2, 1, 2, True, early=True),
    "tiles": Tiles(128, False, 2, 6),
    "tiles-wide": Tiles(256, False, 16, 4),
    "tiles-registers": Tiles(128, True, 16, 6),
    "tiles-registers-wide": Tiles(256, True, 2, 4),
}
BFLOAT16: dict[str, LinearConfig] = {
    "stream": Stream(16, 64, 4, 5, 1, 1, True),
    "stream-rows-first": Stream(16, 32, 4, 4, 1, 1, False),
    "stream-eight": Stream(32, 32, 8, 2, 1, 1, False),
    "stream-split-early": Stream(16, 64, 4, 2, 4, 2, True, early=True),
}


@pytest.fixture(scope="module")
def kernels():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton", reason="the GPU kernels are written in Triton")
    from interlock.kernels.triton.kernels import TritonKernels

    return TritonKernels()


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    rng = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(*shape, device="cuda", generator=rng) * scale).to(dtype)


def fp8_product(x: torch.Tensor, data) -> torch.Tensor:
    """float64 product of x quantised and of the weight that the blocks stand for."""
    values, scale = reference_quantise(x)
    width, depth = data.weight.shape
    wide = (values.double().unflatten(1, (-1, 128)) * scale.T[:, :, None].double()).flatten(1)
    spread = data.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide @ (data.weight.double() * spread[:width, :depth]).T


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 65, 200, 500])
@pytest.mark.parametrize(
    ("width", "depth", "dtype", "bound"), [(768, 2048, BF16, 4e-3), (200, 1024, torch.float32, 1e-3)]
)
def test_fp8(kernels, name, rows, width, depth, dtype, bound) -> None:
    from interlock.kernels.triton.fp8_rows import quantise_rows
    from interlock.kernels.triton.linear_launch import launch

    config = FP8[name]
    if not config.fits(width, depth, "fp8"):
        pytest.skip(f"{config} does not fit {width} x {depth}")
    data = kernels.pack_linear_fp8(draw(width, depth, scale=depth**-0.5)).data
    x = draw(rows, depth)
    got = launch(config, *quantise_rows(x), data.weight, data.scales, dtype)
    assert got.dtype == dtype
    assert relative(got, fp8_product(x, data)) < bound


@pytest.mark.parametrize("name", BFLOAT16)
@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize(("width", "depth"), [(200, 1024)])
def test_bfloat16(kernels, name, rows, width, depth) -> None:
    from interlock.kernels.triton.linear_launch import launch

    x, weight = draw(rows, depth), draw(width, depth, scale=depth**-0.5)
    got = launch(BFLOAT16[name], x, None, weight, None, BF16)
    assert relative(got, x.double() @ weight.double().T) < 4e-3


@pytest.mark.parametrize("rows", [1, 3, 16, 32, 64, 96, 128, 256, 384, 512, 1024, 3000])
def test_what_the_table_chooses(kernels, rows) -> None:
    weight = kernels.pack_linear_fp8(draw(14848, 4096, scale=4096**-0.5))
    x = draw(rows, 4096)
    assert relative(kernels.linear(x, weight), fp8_product(x, weight.data)) < 4e-3
    o = draw(4096, 8192, scale=8192**-0.5)
    x = draw(rows, 8192)
    assert relative(kernels.linear(x, kernels.pack_linear(o)), x.double() @ o.double().T) < 4e-3


@pytest.mark.parametrize("early", [False, True])
def test_a_chain_can_be_captured_and_replayed(kernels, early) -> None:
    """Each linear reads what the one before wrote, so a launch that starts too early shows.

    Each is compared with the product of what it read: along the chain a difference of 1e-5 in a link becomes
    4e-2 after six, since values that fall on other e4m3 numbers move all sums of the next.
    """
    from interlock.kernels.triton.fp8_rows import quantise_rows
    from interlock.kernels.triton.linear_launch import launch

    config = Stream(16, 64, 4, 2, 1, 2, True, early=early)
    data = kernels.pack_linear_fp8(draw(4096, 4096, scale=4096**-0.5)).data
    x = draw(8, 4096)

    def chain() -> list[torch.Tensor]:
        links = [x]
        for _ in range(6):
            links.append(launch(config, *quantise_rows(links[-1]), data.weight, data.scales, BF16))
        return links

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        links = chain()
    for seed in range(3):
        x.copy_(draw(8, 4096, seed=seed))
        graph.replay()
        for read, written in pairwise(links):
            assert relative(written, fp8_product(read, data)) < 4e-3
