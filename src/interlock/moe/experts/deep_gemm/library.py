"""The calls into the package ``sgl-deep-gemm`` (import name ``deep_gemm``): the only file that knows them.

Both multiply e4m3 rows by the weights of their expert: float32 scales for 1 x 128 channels of a row and for
128 x 128 blocks of a weight, products summed in float32, rounded to bfloat16 once. Row scales lie with the
rows of a group side by side, padded to 16 bytes, as the bulk copy engine of Hopper wants them; so nothing is
transposed on the way. Kernels are compiled at their first call (nvcc) and cached in ``~/.deep_gemm``; shapes
are compiled for (experts, N, K) and not for the number of rows. The package has no locks around its caches,
so one thread at a time may call it; kernels are compiled at once by copies of it (``copies``), each in a
thread of its own, and then loaded from the cache.

Legend: E experts, R rows of the aligned segments, M rows of a slab, N weight rows, K depth.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.kernels.triton.compile_ahead import rehearsing
from interlock.kernels.triton.expert_tensors import GROUP
from interlock.moe.experts.deep_gemm.copies import Copies
from interlock.moe.experts.deep_gemm.second_copy import load_second_copy

logger = logging.getLogger(__name__)

EXPECTED_ROWS = 1024
"""Rows an expert is said to have when the library chooses its tiles. One number for all calls, so that one
kernel serves all batches and none is compiled while serving."""


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, their scales, weight, its scales."""
AGREES_WITHIN = 1e-2
"""Relative difference of two products whose sums of float32 were rounded to bfloat16 (2^-9 each)."""
BLOCK_ROWS = 128
"""The most rows of a block of its grouped products; all are stored."""


class DeepGemm:
    """The grouped products and the dense one. None synchronises with the host; a capture needs one call
    before it. Where launches are only rehearsed they compute nothing.

    Args:
        module: the package.
        load_copy: loads another one that shares nothing with it but the cache on disk; kernels are compiled
            at once by several of them.
    """

    def __init__(self, module: Any, load_copy: Callable[[], DeepGemm] | None = None) -> None:
        self.module = module
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deep-gemm")
        self._copies = None if load_copy is None else Copies(load_copy)
        self._compiled: dict[tuple[int, ...], Future[None]] = {}
        self._agrees: dict[tuple[int, ...], bool] = {}

    def compile_ahead(self, shape: tuple[int, ...], products: Sequence[Callable[[DeepGemm], None]]) -> None:
        """Have ``products`` compiled beside this thread, once for each shape; ``finish`` before other calls.

        The compiler is a process of its own, so that weights can be loaded and other kernels compiled
        meanwhile; it takes 5 to 8 s for each product.

        Args:
            products: each calls one product of the library that it is given.
        """
        if shape not in self._compiled:
            filled = [] if self._copies is None else self._copies.fill_cache(products)
            self._compiled[shape] = self._thread.submit(self._load, products, filled)

    def _load(self, products: Sequence[Callable[[DeepGemm], None]], filled: Sequence[Future[None]]) -> None:
        begun = time.monotonic()
        wait(filled)
        for product in products:
            product(self)
        logger.debug("deep_gemm: compiled in %.1f s, beside other work", time.monotonic() - begun)

    def finish(self) -> None:
        """Wait until all that was asked for is compiled.

        Raises:
            StartupError: it cannot be compiled.
        """
        begun = time.monotonic()
        waits = not all(compiled.done() for compiled in self._compiled.values())
        for compiled in self._compiled.values():
            try:
                compiled.result()
            except Exception as problem:
                raise StartupError(
                    f"runner deep_gemm cannot compile its products: {problem} (it calls nvcc, found by "
                    "CUDA_HOME or PATH, and writes to ~/.deep_gemm); --moe-runner-backend triton_fp8 needs "
                    "neither"
                ) from problem
        if waits:
            logger.debug("deep_gemm: waited %.1f s for its compiler", time.monotonic() - begun)

    def contiguous(
        self,
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        psum: torch.Tensor,
    ) -> torch.Tensor:
        """rows e4m3 [R, K], row_scales float32 [K / 128, R], psum int32 [E] -> bfloat16 [R, N].

        Segments start at multiples of 128. weight e4m3 [E, N, K], its scales float32 [E, N / 128, K / 128].
        Rows between the segments may hold anything and give anything.
        """
        out = torch.empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16, device=rows.device)
        if rehearsing():
            return out
        self.module.m_grouped_fp8_gemm_nt_contiguous(
            (rows, row_scales.T),
            (weight, weight_scales),
            out,
            psum,
            use_psum_layout=True,
            expected_m_for_psum_layout=EXPECTED_ROWS,
        )
        return out

    def dense(
        self,
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        own: Callable[[], torch.Tensor],
    ) -> torch.Tensor | None:
        """See ``DenseProducts.dense``. Its tiles depend on the number of rows, so it is compiled for those
        that are rehearsed (a full chunk) and serves no others."""
        rows, (width, depth) = x.shape[0], weight.shape
        if rows % BLOCK_ROWS or width % GROUP:
            return None
        shape = (1, rows, width, depth)
        if rehearsing():
            self.compile_ahead(shape, [partial(_multiply, operands=(x, x_scales, weight, scales))])
            return None
        if shape not in self._compiled or self._agrees.get(shape) is False:
            return None
        if shape in self._agrees:
            return self.multiply(x, x_scales, weight, scales)
        self.finish()
        out, expected = self.multiply(x, x_scales, weight, scales), own()
        difference = relative_difference(out, expected)
        self._agrees[shape] = difference <= AGREES_WITHIN
        if not self._agrees[shape]:
            logger.warning(
                "deep_gemm: the dense product of %d rows with a weight of %d x %d differs from our own "
                "by %.3g (at most %g is rounding): it is not used",
                *(rows, width, depth, difference, AGREES_WITHIN),
            )
        return out if self._agrees[shape] else expected

    def multiply(
        self, x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """As ``dense``, compiled here if it is not yet."""
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        self.module.fp8_gemm_nt((x, x_scales.T), (weight, scales), out, compiled_dims="nk")
        return out

    def masked(
        self,
        rows: torch.Tensor,
        row_scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        counts: torch.Tensor,
        expected_rows: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """rows e4m3 [E, M, K], row_scales float32 [E, K / 128, M], counts int32 [E] -> bfloat16 [E, M, N].

        ``out``: where to, contiguous; None for new memory.

        M is a multiple of 128: blocks of 64 or 128 rows are stored whole, with anything beyond the count.
        ``expected_rows``: how many rows an expert is thought to have; chooses the tiles.
        """
        experts, slab_rows, _ = rows.shape
        assert slab_rows % BLOCK_ROWS == 0, "blocks of one expert would overwrite rows of the next"
        if out is None:
            out = torch.empty(experts, slab_rows, weight.shape[1], dtype=torch.bfloat16, device=rows.device)
        if rehearsing():
            return out
        self.module.fp8_m_grouped_gemm_nt_masked(
            (rows, row_scales.transpose(1, 2)),
            (weight, weight_scales),
            out,
            counts,
            expected_rows,
        )
        return out


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; 0 where both are 0, NaN where one has a NaN."""
    wanted = expected.float()
    return float((found.float() - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Where a thread of its own calls the library for ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _multiply(library: DeepGemm, operands: Operands) -> None:
    """For the compiler: the result is thrown away."""
    with on_device(operands[0].device):
        library.multiply(*operands)


@cache
def load_deep_gemm() -> DeepGemm:
    """Import the package; the same object for all layers.

    Raises:
        StartupError: it cannot be loaded here, or the GPU is not a Hopper.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        raise StartupError(
            "runner deep_gemm is written for GPUs of compute capability 9.x, not "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}; "
            "--moe-runner-backend triton works there"
        )
    try:
        import deep_gemm
    except (ImportError, OSError, RuntimeError, AssertionError) as problem:
        raise StartupError(
            f"runner deep_gemm cannot load the package sgl-deep-gemm: {problem or type(problem).__name__} "
            "(it needs apache-tvm-ffi, CUDA 13 libraries and nvcc, found by PATH or CUDA_HOME); "
            "--moe-runner-backend triton_fp8 needs none of them"
        ) from problem
    return DeepGemm(deep_gemm, lambda: DeepGemm(load_second_copy(deep_gemm)))
