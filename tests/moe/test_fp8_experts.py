"""Loading of the fp8 runner: the checkpoint's blocks as they are, in place. Needs triton, but no GPU."""

from __future__ import annotations

import pytest
import torch

from interlock.errors import CheckpointError
from interlock.kernels.availability import triton_unavailable
from interlock.kernels.fp8_blocks import Fp8Blocks
from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.experts.base import FillsExperts, LoadsFp8, Runner, RunnerSpec

HIDDEN, EXPERTS = 256, 3


def fp8_runner(width: int) -> Runner:
    if (problem := triton_unavailable()) is not None:
        pytest.skip(problem)
    from interlock.moe.experts.triton_fp8.runner import TritonFp8Runner

    return TritonFp8Runner(
        RunnerSpec(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=width,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kernels=TorchKernels(),
        )
    )


def expert(width: int, seed: int) -> tuple[Fp8Blocks, Fp8Blocks, Fp8Blocks]:
    generator = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(width, HIDDEN, generator=generator) for _ in range(2))
    down = torch.randn(HIDDEN, width, generator=generator)
    return Fp8Blocks.quantised(gate), Fp8Blocks.quantised(up), Fp8Blocks.quantised(down)


def held(runner: Runner, index: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate, up and down of an expert as the kernels read them, without padding."""
    tensors = runner._tensors
    wide = tensors.down.shape[2]
    both = Fp8Blocks(tensors.gate_up[index], tensors.gate_up_scales[index]).dequantised(torch.float32)
    down = Fp8Blocks(tensors.down[index], tensors.down_scales[index]).dequantised(torch.float32)
    assert not both[width:wide].any()
    assert not both[wide + width :].any()
    return both[:width], both[wide : wide + width], down[:, :width]


@pytest.mark.parametrize("width", [128, 160, 256])
def test_blocks_are_kept_as_they_are(width: int) -> None:
    """D02, D03: a width of 160 has partial edge blocks: the weight is padded by zeros to 256, not the block
    made smaller."""
    runner = fp8_runner(width)
    assert isinstance(runner, LoadsFp8)
    experts = [expert(width, seed) for seed in range(EXPERTS)]
    for index, blocks in enumerate(experts):
        runner.load_expert_fp8(index, *blocks)
    runner.finish_loading()
    for index, blocks in enumerate(experts):
        for got, want in zip(held(runner, index, width), blocks, strict=True):
            assert torch.equal(got, want.dequantised(torch.float32))
    assert runner.observed().weight_format == "fp8_block"


def test_float_weights_are_quantised() -> None:
    runner = fp8_runner(128)
    for index in range(EXPERTS):
        runner.load_expert(index, *(part.dequantised(torch.float32) for part in expert(128, index)))
    runner.finish_loading()
    for got, want in zip(held(runner, 1, 128), expert(128, 1), strict=True):
        torch.testing.assert_close(got, want.dequantised(torch.float32), rtol=1e-6, atol=1e-6)


def test_experts_that_are_missing_doubled_or_misshapen_are_named() -> None:
    runner = fp8_runner(128)
    runner.load_expert_fp8(0, *expert(128, 0))
    with pytest.raises(CheckpointError, match="expert 0 of this rank is loaded twice"):
        runner.load_expert_fp8(0, *expert(128, 0))
    with pytest.raises(CheckpointError, match=r"gate projection is \(256, 256\), expected \(128, 256\)"):
        runner.load_expert_fp8(1, *expert(256, 0))
    with pytest.raises(IndexError, match="local expert 3 of 3"):
        runner.load_expert_fp8(3, *expert(128, 0))
    with pytest.raises(CheckpointError, match=r"experts \[1, 2\] of this rank were not loaded"):
        runner.finish_loading()


class Ones:
    """Fills everything with ones."""

    def gate_up(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        values.copy_(torch.ones(values.shape))
        assert scales is not None
        scales.fill_(1.0)

    down = gate_up


@pytest.mark.parametrize("width", [128, 160])
def test_a_fill_reaches_every_expert_and_no_padding(width: int) -> None:
    runner = fp8_runner(width)
    assert isinstance(runner, FillsExperts)
    runner.fill_experts(Ones())
    runner.finish_loading()
    for index in range(EXPERTS):
        assert all(bool((part == 1).all()) for part in held(runner, index, width))
