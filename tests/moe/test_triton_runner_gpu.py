"""The Triton runners in every layout on a CUDA device (``pytest -m gpu``), against float64 emulations."""

from __future__ import annotations

import pytest
import torch

from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.experts.registry import expert_runners
from interlock.moe.fp8_rows import quantise_rows
from interlock.plugins import load_symbol
from tests.kernels.triton_cases import random_routes, reference_lanes, relative

pytestmark = pytest.mark.gpu
EXPERTS, HIDDEN, WIDTH, SLAB = 4, 256, 136, 40
BF16 = torch.bfloat16


def place(layout: str, x: torch.Tensor, expert: torch.Tensor) -> tuple[torch.Tensor, ExpertInput]:
    """Lanes x [P, h] of experts [P] in a layout -> (place of each lane, rows with weights of one half)."""
    counts = torch.bincount(expert, minlength=EXPERTS).int()
    starts = torch.arange(EXPERTS) * SLAB
    total = EXPERTS * SLAB
    if layout == "contiguous":
        padded = (counts + 7) // 8 * 8
        starts = padded.cumsum(0) - padded
        total = int(padded.sum())
    rank = torch.stack([(expert[:lane] == expert[lane]).sum() for lane in range(len(expert))])
    at = (starts[expert] + rank).cuda()
    rows = torch.full((total, HIDDEN), float("nan"), dtype=BF16, device="cuda")
    rows[at] = x
    weights = torch.full((total,), 0.5, device="cuda")
    if layout == "contiguous":
        psum = (starts + counts).int().cuda()
        return at, ContiguousRows(rows, psum, counts.cuda(), 8, weights)
    return at, MaskedRows(rows.view(EXPERTS, SLAB, HIDDEN), counts.cuda(), weights.view(EXPERTS, SLAB))


@pytest.mark.parametrize("layout", ["replicated", "contiguous", "masked"])
@pytest.mark.parametrize("name", ["triton", "triton_fp8"])
def test_run_in_every_layout(name, layout) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton", reason="the GPU kernels are written in Triton")
    device = torch.device("cuda")
    spec = RunnerSpec(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        dtype=BF16,
        device=device,
        kernels=TorchKernels(),
    )
    runner = load_symbol(expert_runners().get(name).runner)(spec)
    for expert in range(EXPERTS):
        shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
        runner.load_expert(expert, *(torch.randn(shape, device="cuda") * 0.1 for shape in shapes))
    runner.finish_loading()
    ids, weights = random_routes(20, 2, EXPERTS, device="cuda", unused=0.2)
    x = torch.randn(20, HIDDEN, device="cuda").to(BF16)
    if layout == "replicated":
        got = runner.run(ReplicatedRows(x, ids, weights))
        want = reference_lanes(x, ids, weights, runner._tensors)
        assert relative(got[ids >= 0], want[ids >= 0]) < 1e-2
        if name == "triton_fp8":
            again = runner.run(ReplicatedRows(*_quantised(x, ids, weights)))
            assert relative(again[ids >= 0], want[ids >= 0]) < 1e-2
    else:
        lane = (ids >= 0).nonzero()
        chosen = ids[ids >= 0]
        at, rows = place(layout, x[lane[:, 0]], chosen.cpu())
        got = runner.run(rows).view(-1, HIDDEN)[at]
        halves = torch.full((len(chosen), 1), 0.5, device="cuda")
        want = reference_lanes(x[lane[:, 0]], chosen[:, None], halves, runner._tensors)[:, 0]
        assert relative(got, want) < 1e-2
    assert runner.observed().name == name


def _quantised(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    values, scales = quantise_rows(x)
    return values, ids, weights, scales
