"""Two ways to compute one set of weights; the number of rows decides, by ``choice.best_runner``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from interlock.kernels.triton import moe
from interlock.moe.a2a.rows import ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.experts.base import RunnerReceipt, RunnerSpec
from interlock.moe.experts.choice import ExpertShape, best_runner
from interlock.moe.experts.deep_gemm.library import DeepGemm
from interlock.moe.experts.deep_gemm.runner import DeepGemmRunner
from interlock.moe.experts.fastest_fp8 import FEW, MANY, RUNNER
from interlock.moe.experts.triton.runner import SLAB_FILL
from interlock.moe.experts.triton_fp8.runner import TritonFp8Runner
from interlock.moe.terms import Layout

MANY_ROWS = 64
"""Rows an expert from which DeepGEMM is taken where the table has no times for both: its products alone were
faster than ours from there on (docs/performance.md)."""


class FastestFp8Runner(DeepGemmRunner):
    """Runner ``fastest_fp8``. Shapes decide, so a captured step always takes the same way."""

    name = RUNNER.name

    def __init__(self, spec: RunnerSpec, library: DeepGemm | None = None) -> None:
        super().__init__(spec, library)
        self._shape = ExpertShape(spec.num_experts, spec.hidden_size, spec.intermediate_size)
        self._picks: dict[tuple[Layout, int], str] = {}
        self._taken: Counter[str] = Counter({FEW: 0, MANY: 0})

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``."""
        if self._pick(rows) == MANY:
            return super().run(rows)
        return TritonFp8Runner.run(self, rows)

    def run_summed(self, rows: ReplicatedRows, dtype: torch.dtype) -> torch.Tensor:
        """See ``SumsLanes.run_summed``."""
        if self._pick(rows) == MANY:
            return super().run_summed(rows, dtype)
        return moe.sum_lanes(TritonFp8Runner.run(self, rows), rows.ids, dtype)

    def observed(self) -> RunnerReceipt:
        """See ``Runner.observed``; ``extra`` has the calls that each of the two got."""
        receipt = super().observed()
        return replace(receipt, extra={**receipt.extra, "calls_by_runner": dict(self._taken)})

    def _pick(self, rows: ExpertInput) -> str:
        self._settle()
        if isinstance(rows, ReplicatedRows):
            count = self._spec.local_rows(rows.ids.numel())
        elif isinstance(rows, MaskedRows):
            count = rows.rows.shape[0] * rows.rows.shape[1] // SLAB_FILL
        else:
            count = rows.rows.shape[0]
        key = (rows.layout, count)
        if key not in self._picks:
            self._picks[key] = pick(self._shape, rows.layout, count)
        self._taken[self._picks[key]] += 1
        return self._picks[key]


def pick(shape: ExpertShape, layout: Layout, rows: int) -> str:
    """The runner for ``rows`` routed rows: by measured times, or by rows an expert where one has none."""
    best = best_runner((FEW, MANY), shape, "fp8_block", layout, rows)
    if best.compared:
        return best.runner
    return MANY if rows >= MANY_ROWS * shape.experts else FEW
