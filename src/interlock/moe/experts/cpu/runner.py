"""The CPU runner: one ``expert_mlp`` call a layer, rows read where they lie and results written in place."""

from __future__ import annotations

import torch

from interlock.kernels.base import PackedExperts
from interlock.moe.a2a.rows import ExpertInput, ReplicatedRows
from interlock.moe.experts.base import RunnerReceipt, RunnerSpec
from interlock.moe.experts.cpu import RUNNER
from interlock.moe.experts.weights import ExpertWeights
from interlock.moe.fp8_rows import dequantise_rows
from interlock.moe.layouts import expert_rows
from interlock.moe.native_moe import native_moe

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CpuRunner:
    """Runner ``cpu``. fp8 weights arrive dequantised, fp8 rows are dequantised before the kernel."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._spec = spec
        self._loading: ExpertWeights | None = None
        self._packed: PackedExperts | None = None
        native = native_moe(spec.kernels)
        self._lists = expert_rows if native is None else native.expert_rows
        self._calls = 0
        self._rows = 0

    def load_expert(self, local_id: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """See ``Runner.load_expert``."""
        if self._loading is None:
            self._loading = ExpertWeights(self._spec)
        self._loading.load(local_id, gate, up, down)

    def finish_loading(self) -> None:
        """See ``Runner.finish_loading``. The unpacked copy is freed."""
        loading = self._loading or ExpertWeights(self._spec)
        loading.require_all()
        self._packed = self._spec.kernels.pack_experts(loading.gate_up, loading.down)
        self._loading = None

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``."""
        if self._packed is None:
            raise RuntimeError("run was called before finish_loading")
        spec = self._spec
        lists = self._lists(rows, spec.num_experts)
        x = rows.rows if rows.scales is None else dequantise_rows(rows.rows, rows.scales, spec.dtype)
        lead = rows.ids.shape if isinstance(rows, ReplicatedRows) else rows.rows.shape[:-1]
        out = torch.empty(*lead, spec.hidden_size, dtype=spec.dtype)
        spec.kernels.expert_mlp(
            x.view(-1, spec.hidden_size), self._packed, lists, out.view(-1, spec.hidden_size)
        )
        self._calls += 1
        self._rows += lists.source.shape[0]
        return out

    def observed(self) -> RunnerReceipt:
        """See ``Runner.observed``."""
        packed = self._packed
        name = DTYPE_NAMES[packed.dtype if packed is not None else self._spec.dtype]
        return RunnerReceipt(
            name=RUNNER.name,
            runner=f"{type(self).__module__}:{type(self).__qualname__}",
            weight_format=name,
            dtype=DTYPE_NAMES[self._spec.dtype],
            weight_bytes=packed.nbytes if packed is not None else 0,
            calls=self._calls,
            rows=self._rows,
        )
