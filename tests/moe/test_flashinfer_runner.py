"""The adapter of FlashInfer's fused MoE against a stand-in that computes what the library documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from interlock.errors import StartupError
from interlock.kernels.availability import triton_unavailable
from interlock.kernels.fp8_blocks import Fp8Blocks
from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.a2a.rows import ReplicatedRows
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.experts.registry import expert_runners
from tests.moe.test_fp8_experts import EXPERTS, HIDDEN, expert

WIDTH = 128


def library(**given: Any) -> None:
    """``cutlass_fused_moe`` with block scales: up rows first, lanes outside of the experts add nothing."""
    assert given["use_deepseek_fp8_block_scale"] is True
    assert given["token_selected_experts"].dtype == torch.int32
    assert given["input"].dtype == torch.bfloat16
    fc1_scales, fc2_scales = given["quant_scales"]
    total = torch.zeros(given["output"].shape)
    for expert_id in range(len(fc1_scales)):
        first = Fp8Blocks(given["fc1_expert_weights"][expert_id], fc1_scales[expert_id])
        second = Fp8Blocks(given["fc2_expert_weights"][expert_id], fc2_scales[expert_id])
        up, gate = (given["input"].float() @ first.dequantised(torch.float32).T).chunk(2, dim=1)
        result = (silu(gate) * up) @ second.dequantised(torch.float32).T
        chosen = given["token_selected_experts"] == expert_id
        total += (given["token_final_scales"] * chosen).sum(1, keepdim=True) * result
    given["output"].copy_(total)


def loaded(fused_moe: Any = library) -> Any:
    if (problem := triton_unavailable()) is not None:
        pytest.skip(problem)
    from interlock.moe.experts.flashinfer_cutlass.runner import FlashInferCutlassRunner

    spec = RunnerSpec(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=TorchKernels(),
    )
    runner = FlashInferCutlassRunner(spec, fused_moe)
    for index in range(EXPERTS):
        runner.load_expert_fp8(index, *expert(WIDTH, index))
    runner.finish_loading()
    return runner


def exact(row: torch.Tensor, index: int) -> torch.Tensor:
    gate, up, down = (part.dequantised(torch.float32).double() for part in expert(WIDTH, index))
    x = row.double()
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def test_lanes_and_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
    ids = torch.tensor([[0, 2], [-1, 1], [1, 2], [-1, -1], [0, 1]])
    weights = torch.rand(5, 2, generator=generator)
    rows = ReplicatedRows(x, ids, weights)
    runner = loaded()
    lanes, summed = runner.run(rows), runner.run_summed(rows, torch.float32)
    assert lanes.shape == (5, 2, HIDDEN)
    assert lanes.dtype == torch.bfloat16
    for token in range(5):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for lane in range(2):
            index = int(ids[token, lane])
            if index < 0:
                continue
            want = float(weights[token, lane]) * exact(x[token], index)
            total += want
            torch.testing.assert_close(
                lanes[token, lane].double(), want, rtol=0.02, atol=0.02 * float(want.abs().max())
            )
        torch.testing.assert_close(
            summed[token].double(), total, rtol=0.02, atol=0.02 * float(total.abs().max()) + 1e-9
        )
    receipt = runner.observed()
    assert (receipt.name, receipt.weight_format, receipt.calls) == ("flashinfer_cutlass", "fp8_block", 2)


def test_no_tokens_call_nothing() -> None:
    rows = ReplicatedRows(
        torch.zeros(0, HIDDEN, dtype=torch.bfloat16), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    )
    assert loaded(lambda **_: pytest.fail("called")).run(rows).shape == (0, 2, HIDDEN)


def test_a_missing_package_is_named() -> None:
    if (problem := triton_unavailable()) is not None:
        pytest.skip(problem)
    from interlock.moe.experts.flashinfer_cutlass.runner import load_fused_moe

    with pytest.raises(StartupError, match=r"flashinfer-python.*triton_fp8 needs no library"):
        load_fused_moe()


def test_the_library_is_not_imported_by_the_declarations() -> None:
    for name in ("flashinfer_cutlass", "flashinfer_trtllm"):
        assert expert_runners().get(name).name == name
