"""The runner around ``pipeline``: weights as ``triton_fp8`` loads them, DeepGEMM for the products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from interlock.kernels.triton.compile_ahead import rehearsing
from interlock.kernels.triton.dense_products import TakesDenseProducts
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, ReplicatedRows
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.experts.deep_gemm import RUNNER
from interlock.moe.experts.deep_gemm.library import DeepGemm, load_deep_gemm
from interlock.moe.experts.deep_gemm.pipeline import Pipeline
from interlock.moe.experts.triton_fp8.runner import TritonFp8Runner


class DeepGemmRunner(TritonFp8Runner):
    """Runner ``deep_gemm``: every call goes through DeepGEMM.

    Its products are compiled from the moment it is made. The first call that is no rehearsal waits for them,
    so that it takes no longer than the compilation of our own kernels; no capture can begin before.
    Linears of the same kernels may take its dense product (``DenseProducts``).
    Gate and up are rounded to bfloat16 before SwiGLU, which is part of its format: compare it with an
    emulation that does so too (without, results differ by 1.0e-2 to 2.4e-2).
    """

    name = RUNNER.name

    def __init__(self, spec: RunnerSpec, library: DeepGemm | None = None) -> None:
        super().__init__(spec)
        self._library = library or load_deep_gemm()
        self._compiled = False
        if isinstance(spec.kernels, TakesDenseProducts):
            spec.kernels.take_dense_products(self._library)
        shape = tuple(self._loading.down.shape)
        self._library.compile_ahead(shape, Pipeline(self._library, self._loading).products_on_nothing())

    def run(self, rows: ExpertInput) -> torch.Tensor:
        """See ``Runner.run``."""
        self._settle()
        places = rows.ids.numel() if isinstance(rows, ReplicatedRows) else rows.rows[..., 0].numel()
        self._calls += 1
        self._rows += places
        if places == 0:
            lead = rows.ids.shape if isinstance(rows, ReplicatedRows) else rows.rows.shape[:-1]
            return torch.empty(*lead, self._spec.hidden_size, dtype=self._spec.dtype, device=rows.rows.device)
        pipeline = self._pipeline()
        if isinstance(rows, ReplicatedRows):
            return pipeline.lanes(rows)
        if isinstance(rows, ContiguousRows):
            return pipeline.contiguous(rows)
        return pipeline.masked(rows)

    def run_summed(self, rows: ReplicatedRows, dtype: torch.dtype) -> torch.Tensor:
        """See ``SumsLanes.run_summed``."""
        self._settle()
        tokens = rows.ids.shape[0]
        self._calls += 1
        self._rows += rows.ids.numel()
        if tokens == 0:
            return torch.empty(0, self._spec.hidden_size, dtype=dtype, device=rows.rows.device)
        return self._pipeline().summed(rows, dtype)

    def products_alone(self, rows: ReplicatedRows) -> Callable[[], torch.Tensor]:
        """A call that repeats only the two products; for measuring what the kernels around them cost."""
        self._settle()
        return self._pipeline().products_alone(rows)

    def _settle(self) -> None:
        """Wait for the compiler, the first time that something is computed."""
        if not self._compiled and not rehearsing():
            self._library.finish()
            self._compiled = True

    def _pipeline(self) -> Pipeline:
        if self._tensors is None:
            raise RuntimeError("run was called before finish_loading")
        return Pipeline(self._library, self._tensors)
