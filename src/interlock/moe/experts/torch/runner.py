"""The reference runner: one expert after the other, two matrix products and a weighted copy."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from interlock.moe.a2a.rows import ExpertInput
from interlock.moe.experts.base import RunnerReceipt, RunnerSpec
from interlock.moe.experts.one_by_one import run_one_by_one
from interlock.moe.experts.torch import RUNNER
from interlock.moe.experts.weights import ExpertWeights

ACTIVATION_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class TorchRunner:
    """Runner ``torch``."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._weights = ExpertWeights(spec)
        self._calls = 0
        self._rows = 0

    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """See ``Runner.load_expert``."""
        self._weights.load(local_id, gate, up, down)

    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``."""
        self._weights.require_all()

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``."""
        out, computed = run_one_by_one(rows, self._spec, self._expert, reads=self._spec.dtype)
        self._calls += 1
        self._rows += computed
        return out

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x.float(), self._weights.gate_up[expert].float()).chunk(2, dim=-1)
        hidden = (silu(gate) * up).to(self._spec.dtype)
        return linear(hidden.float(), self._weights.down[expert].float())

    def observed(self) -> RunnerReceipt:
        """See ``Runner.observed``."""
        name = ACTIVATION_NAMES[self._spec.dtype]
        return RunnerReceipt(
            name=RUNNER.name,
            runner=f"{type(self).__module__}:{type(self).__qualname__}",
            weight_format=name,
            dtype=name,
            weight_bytes=self._weights.gate_up.nbytes + self._weights.down.nbytes,
            calls=self._calls,
            rows=self._rows,
        )
