"""Loading the experts of one layer: space for all of them, filled one by one, each exactly once."""

from __future__ import annotations

import torch

from interlock.errors import CheckpointError
from interlock.moe.experts.base import ExpertFill, RunnerSpec


class ExpertWeights:
    """gate_up [L, 2i, h] (gate rows first) and down [L, h, i] in the activation dtype."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        count, width, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
        self.gate_up = torch.empty(count, 2 * width, hidden, dtype=spec.dtype, device=spec.device)
        self.down = torch.empty(count, hidden, width, dtype=spec.dtype, device=spec.device)
        self._loaded: set[int] = set()

    def load(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Copy one expert, converting to the activation dtype."""
        width, hidden = self._spec.intermediate_size, self._spec.hidden_size
        if not 0 <= local_id < self._spec.num_experts:
            raise IndexError(f"local expert {local_id} of {self._spec.num_experts}")
        if local_id in self._loaded:
            raise CheckpointError(f"expert {local_id} of this rank is loaded twice")
        for name, tensor, shape in (
            ("gate", gate, (width, hidden)),
            ("up", up, (width, hidden)),
            ("down", down, (hidden, width)),
        ):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{name} projection is {tuple(tensor.shape)}, expected {shape}")
        self.gate_up[local_id, :width].copy_(gate)
        self.gate_up[local_id, width:].copy_(up)
        self.down[local_id].copy_(down)
        self._loaded.add(local_id)

    def fill(self, fill: ExpertFill) -> None:
        """Have all experts made up at once."""
        fill.gate_up(self.gate_up, None)
        fill.down(self.down, None)
        self._loaded.update(range(self._spec.num_experts))

    def require_all(self) -> None:
        missing = sorted(set(range(self._spec.num_experts)) - self._loaded)
        if missing:
            raise CheckpointError(f"experts {missing} of this rank were not loaded")
