"""W8A8 experts, one after the other: rows and the intermediate activation are quantised as the GPU does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu

from interlock.errors import CheckpointError
from interlock.kernels.fp8_blocks import BLOCK, Fp8Blocks, linear_w8a8
from interlock.moe.a2a.rows import ExpertInput
from interlock.moe.experts.base import RunnerReceipt, RunnerSpec
from interlock.moe.experts.one_by_one import run_one_by_one
from interlock.moe.experts.torch_fp8 import RUNNER

Projections = tuple[Fp8Blocks, Fp8Blocks, Fp8Blocks]


class TorchFp8Runner:
    """Runner ``torch_fp8``. A width that is no multiple of 128 is padded by zeros."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._experts: dict[int, Projections] = {}
        self._calls = 0
        self._rows = 0

    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """See ``Runner.load_expert``. Float weights are quantised."""
        self._check(local_id, gate.shape, up.shape, down.shape)
        device = self._spec.device
        self._keep(local_id, *(Fp8Blocks.quantised(part.to(device).float()) for part in (gate, up, down)))

    def load_expert_fp8(self, local_id: int, gate: Fp8Blocks, up: Fp8Blocks, down: Fp8Blocks) -> None:
        """See ``LoadsFp8.load_expert_fp8``."""
        self._check(local_id, gate.shape, up.shape, down.shape)
        self._keep(local_id, *(part.to(self._spec.device) for part in (gate, up, down)))

    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``."""
        missing = sorted(set(range(self._spec.num_experts)) - self._experts.keys())
        if missing:
            raise CheckpointError(f"experts {missing} of this rank were not loaded")

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``. Rows that arrive as fp8 are used as they are: quantising them again gives them
        back."""
        out, computed = run_one_by_one(rows, self._spec, self._expert, reads=torch.float32)
        self._calls += 1
        self._rows += computed
        return out

    def observed(self) -> RunnerReceipt:
        """See ``Runner.observed``."""
        return RunnerReceipt(
            name=RUNNER.name,
            runner=f"{type(self).__module__}:{type(self).__qualname__}",
            weight_format="fp8_block",
            dtype=str(self._spec.dtype).removeprefix("torch."),
            weight_bytes=sum(part.nbytes for parts in self._experts.values() for part in parts),
            calls=self._calls,
            rows=self._rows,
        )

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [m, h] -> float32 [m, h]."""
        gate, up, down = self._experts[expert]
        hidden = silu(linear_w8a8(x, gate, torch.float32)) * linear_w8a8(x, up, torch.float32)
        return linear_w8a8(hidden, down, torch.float32)

    def _keep(self, local_id: int, gate: Fp8Blocks, up: Fp8Blocks, down: Fp8Blocks) -> None:
        hidden = self._spec.hidden_size
        wide = -(-self._spec.intermediate_size // BLOCK) * BLOCK
        self._experts[local_id] = (
            gate.padded(wide, hidden),
            up.padded(wide, hidden),
            down.padded(hidden, wide),
        )

    def _check(self, local_id: int, *shapes: Sequence[int]) -> None:
        width, hidden = self._spec.intermediate_size, self._spec.hidden_size
        if not 0 <= local_id < self._spec.num_experts:
            raise IndexError(f"local expert {local_id} of {self._spec.num_experts}")
        if local_id in self._experts:
            raise CheckpointError(f"expert {local_id} of this rank is loaded twice")
        expected = ((width, hidden), (width, hidden), (hidden, width))
        for name, found, shape in zip(("gate", "up", "down"), shapes, expected, strict=True):
            if tuple(found) != shape:
                raise CheckpointError(f"{name} projection is {tuple(found)}, expected {shape}")
