"""The adapter: weights as ``triton_fp8`` loads them with up before gate, and one library call a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.kernels.triton.expert_tensors import ExpertTensors
from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.experts.flashinfer_cutlass import RUNNER
from interlock.moe.experts.triton_fp8.runner import TritonFp8Runner

FusedMoE = Callable[..., Any]


class FlashInferCutlassRunner(TritonFp8Runner):
    """Runner ``flashinfer_cutlass``.

    Args:
        fused_moe: ``flashinfer.fused_moe.cutlass_fused_moe``, or what stands in for it.
    """

    name = RUNNER.name

    def __init__(self, spec: RunnerSpec, fused_moe: FusedMoE | None = None) -> None:
        super().__init__(spec)
        self._fused_moe = fused_moe or load_fused_moe()

    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``. The library reads up rows first, then gate rows."""
        super().finish_loading()
        held = self._tensors
        assert held is not None
        assert held.gate_up_scales is not None
        values = _halves_swapped(held.gate_up.view(torch.uint8)).view(held.gate_up.dtype)
        self._tensors = ExpertTensors(
            values, held.down, _halves_swapped(held.gate_up_scales), held.down_scales
        )

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``. Each lane is a token of one expert, so that nothing is summed."""
        assert isinstance(rows, ReplicatedRows), "the planner joins this runner with replicated rows only"
        tokens, lanes = rows.ids.shape
        x = rows.rows.repeat_interleave(lanes, 0)
        weights = None if rows.weights is None else rows.weights.reshape(-1, 1)
        results = self._call(x, rows.ids.reshape(-1, 1), weights, self._spec.dtype)
        return results.view(tokens, lanes, self._spec.hidden_size)

    def run_summed(self, rows: ReplicatedRows, dtype: torch.dtype) -> torch.Tensor:
        """See ``SumsLanes.run_summed``. The library adds lanes in an order of its own."""
        return self._call(rows.rows, rows.ids, rows.weights, dtype)

    def _call(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [n, h] bfloat16, ids [n, k] local expert or -1, weights float32 [n, k] -> [n, h]."""
        held = self._tensors
        if held is None:
            raise RuntimeError("run was called before finish_loading")
        self._calls += 1
        self._rows += ids.numel()
        out = torch.empty(x.shape[0], self._spec.hidden_size, dtype=torch.bfloat16, device=x.device)
        if x.shape[0]:
            self._fused_moe(
                input=x.contiguous(),
                token_selected_experts=ids.to(torch.int32),
                token_final_scales=torch.ones_like(ids, dtype=torch.float32) if weights is None else weights,
                fc1_expert_weights=held.gate_up,
                fc2_expert_weights=held.down,
                output_dtype=torch.bfloat16,
                quant_scales=[held.gate_up_scales, held.down_scales],
                output=out,
                use_deepseek_fp8_block_scale=True,
            )
        return out.to(dtype)


def load_fused_moe() -> FusedMoE:
    """Import the library's entry point.

    Raises:
        StartupError: the package cannot be loaded here.
    """
    try:
        from flashinfer.fused_moe import cutlass_fused_moe
    except (ImportError, OSError, RuntimeError) as problem:
        raise StartupError(
            f"runner {RUNNER.name} cannot load the package flashinfer-python: {problem}; "
            "--moe-runner-backend triton_fp8 needs no library"
        ) from problem
    entry: FusedMoE = cutlass_fused_moe
    return entry


def _halves_swapped(tensor: torch.Tensor) -> torch.Tensor:
    """[E, 2n, ...] with the second n rows of each expert first."""
    half = tensor.shape[1] // 2
    return torch.cat((tensor[:, half:], tensor[:, :half]), dim=1)
