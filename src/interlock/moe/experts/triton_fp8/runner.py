"""The fp8 runner's weights: quantised one expert at a time, so that loading needs little more than they
do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlock.errors import CheckpointError
from interlock.kernels.fp8_blocks import Fp8Blocks
from interlock.kernels.triton.expert_tensors import GROUP, ExpertTensors, pad_width, quantise_blocks
from interlock.moe.experts.base import ExpertFill, RunnerSpec
from interlock.moe.experts.triton.runner import GroupedRunner
from interlock.moe.experts.triton_fp8 import RUNNER


class TritonFp8Runner(GroupedRunner):
    """Runner ``triton_fp8``.

    A checkpoint's fp8 blocks are kept as they are (``load_expert_fp8``); float weights are quantised.
    """

    name = RUNNER.name
    weight_format = "fp8_block"

    def __init__(self, spec: RunnerSpec) -> None:
        super().__init__(spec)
        if spec.hidden_size % GROUP:
            raise ValueError(
                f"runner triton_fp8 needs a hidden size in multiples of {GROUP}, got {spec.hidden_size}; "
                "runner triton computes bfloat16 weights of any width"
            )
        self._missing = set(range(spec.num_experts))
        self._loading = self._space()

    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """See ``Runner.load_expert``."""
        self._check(local_id, gate.shape, up.shape, down.shape)
        device = self._spec.device
        both = torch.cat((gate.to(device).float(), up.to(device).float()))[None]
        gate_up, wide_down = pad_width(both, down.to(device).float()[None])
        space = self._loading
        assert space.gate_up_scales is not None
        assert space.down_scales is not None
        space.gate_up[local_id], space.gate_up_scales[local_id] = quantise_blocks(gate_up[0])
        space.down[local_id], space.down_scales[local_id] = quantise_blocks(wide_down[0])
        self._missing.discard(local_id)

    def load_expert_fp8(self, local_id: int, gate: Fp8Blocks, up: Fp8Blocks, down: Fp8Blocks) -> None:
        """See ``LoadsFp8.load_expert_fp8``."""
        self._check(local_id, gate.shape, up.shape, down.shape)
        space, hidden = self._loading, self._spec.hidden_size
        assert space.gate_up_scales is not None
        assert space.down_scales is not None
        wide = space.down.shape[2]
        for half, part in enumerate((gate.padded(wide, hidden), up.padded(wide, hidden))):
            space.gate_up[local_id, half * wide : (half + 1) * wide].copy_(part.values)
            groups = wide // GROUP
            space.gate_up_scales[local_id, half * groups : (half + 1) * groups].copy_(part.scales)
        padded = down.padded(hidden, wide)
        space.down[local_id].copy_(padded.values)
        space.down_scales[local_id].copy_(padded.scales)
        self._missing.discard(local_id)

    def fill_experts(self, fill: ExpertFill) -> None:
        """See ``FillsExperts.fill_experts``. Columns that pad the width are filled too, and then cleared."""
        space, width = self._loading, self._spec.intermediate_size
        fill.gate_up(space.gate_up, space.gate_up_scales)
        fill.down(space.down, space.down_scales)
        wide = space.down.shape[2]
        if width < wide:
            space.gate_up.view(torch.uint8)[:, width:wide].zero_()
            space.gate_up.view(torch.uint8)[:, wide + width :].zero_()
        self._missing.clear()

    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``."""
        if self._missing:
            raise CheckpointError(f"experts {sorted(self._missing)} of this rank were not loaded")
        self._tensors = self._loading

    def _check(self, local_id: int, *shapes: Sequence[int]) -> None:
        width, hidden = self._spec.intermediate_size, self._spec.hidden_size
        if not 0 <= local_id < self._spec.num_experts:
            raise IndexError(f"local expert {local_id} of {self._spec.num_experts}")
        if local_id not in self._missing:
            raise CheckpointError(f"expert {local_id} of this rank is loaded twice")
        expected = ((width, hidden), (width, hidden), (hidden, width))
        for name, found, shape in zip(("gate", "up", "down"), shapes, expected, strict=True):
            if tuple(found) != shape:
                raise CheckpointError(f"{name} projection is {tuple(found)}, expected {shape}")

    def _space(self) -> ExpertTensors:
        count, hidden = self._spec.num_experts, self._spec.hidden_size
        width = -(-self._spec.intermediate_size // GROUP) * GROUP
        device = self._spec.device

        def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            values = torch.empty(count, rows, columns, dtype=torch.float8_e4m3fn, device=device)
            return values, torch.empty(count, rows // GROUP, columns // GROUP, device=device)

        gate_up, gate_up_scales = empty(2 * width, hidden)
        down, down_scales = empty(hidden, width)
        return ExpertTensors(gate_up, down, gate_up_scales, down_scales)
