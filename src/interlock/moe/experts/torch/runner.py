"""The reference runner: one expert after the other, two matrix products and a weighted copy."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from interlock.moe.a2a.base import ExpertInput, ReplicatedRows
from interlock.moe.experts.base import RunnerReceipt, RunnerSpec
from interlock.moe.experts.torch import RUNNER
from interlock.moe.experts.weights import ExpertWeights
from interlock.moe.fp8_rows import dequantise_rows
from interlock.moe.layouts import expert_rows

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
        dtype = self._spec.dtype
        lists = expert_rows(rows, self._spec.num_experts)
        x = rows.rows if rows.scales is None else dequantise_rows(rows.rows, rows.scales, dtype)
        x = x.flatten(0, -2)
        lead = rows.ids.shape if isinstance(rows, ReplicatedRows) else rows.rows.shape[:-1]
        out = torch.empty(*lead, self._spec.hidden_size, dtype=dtype, device=x.device)
        flat = out.view(-1, self._spec.hidden_size)
        offsets = lists.offsets.tolist()
        for expert in range(self._spec.num_experts):
            part = slice(offsets[expert], offsets[expert + 1])
            if part.start == part.stop:
                continue
            result = self._expert(expert, x[lists.source[part]])
            flat[lists.target[part]] = (result * lists.weight[part].unsqueeze(1)).to(dtype)
        self._calls += 1
        self._rows += offsets[-1]
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
