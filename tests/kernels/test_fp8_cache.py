"""Keys and values cached as e4m3: what the reference writes and reads, and the Triton kernels beside it.

``TRITON_INTERPRET=1 pytest tests/kernels/test_fp8_cache.py`` runs the latter on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlock.kernels.availability import triton_unavailable
from interlock.kernels.base import Kernels
from interlock.kernels.torch_reference import TorchKernels

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, PAGE = 4, 2, 48, 32, 4


def interpreted() -> Kernels:
    problem = triton_unavailable()
    if problem is not None:
        pytest.skip(problem)
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1 to run the GPU kernels on the CPU")
    from interlock.kernels.triton.kernels import TritonKernels

    return TritonKernels()


def filled(kernels: Kernels, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """(rotated q, k cache, v cache) after seven tokens; slot -1 writes nothing."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(7, heads, width, generator=generator) * scale
        for heads, width in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE_WIDTH))
    )
    caches = [torch.zeros(3, PAGE, KV_HEADS, width).to(dtype) for width in (WIDTH, VALUE_WIDTH)]
    angles = torch.randn(16, 8, generator=generator)
    rotated = kernels.rope_and_store(
        q,
        k,
        v,
        positions=torch.arange(7),
        cos_sin=torch.cat([angles.cos(), angles.sin()], 1),
        k_cache=caches[0],
        v_cache=caches[1],
        slots=torch.tensor([8, 9, 10, 11, 0, 1, -1]),
        value_scale=0.7,
    )
    return rotated, *caches


def attended(kernels: Kernels, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "page_table": torch.tensor([[2, 0]], dtype=torch.int32),
        "query_start": torch.tensor([0, 6], dtype=torch.int32),
        "kv_len": torch.tensor([6], dtype=torch.int32),
        "scale": WIDTH**-0.5,
        "window": 4,
        "sinks": torch.randn(HEADS, generator=torch.Generator().manual_seed(2)),
    }
    return kernels.paged_attention(q[:6], k_cache=k, v_cache=v, **arguments)


def test_the_reference_rounds_what_it_writes_and_reads_it_back() -> None:
    kernels = TorchKernels()
    rotated, k, v = filled(kernels, torch.float8_e4m3fn)
    _, exact_k, exact_v = filled(kernels, torch.float32)
    assert k.dtype == v.dtype == torch.float8_e4m3fn
    for rounded, exact in ((k, exact_k), (v, exact_v)):
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-4, atol=2**-9)
    assert not k.float().flatten(0, 1)[2:8].any()
    want = attended(kernels, rotated, k.float(), v.float())
    assert torch.equal(attended(kernels, rotated, k, v), want)


def test_values_beyond_the_largest_are_clamped() -> None:
    """D11, D12: e4m3 has no infinity: a plain cast would give NaN."""
    _, k, v = filled(TorchKernels(), torch.float8_e4m3fn, scale=1000.0)
    assert bool(k.float().isfinite().all())
    assert float(v.float().abs().max()) == 448.0


def test_triton_writes_and_reads_as_the_reference() -> None:
    """The interpreter drops the carry of a mantissa that rounds up to the next power of two, so a few of
    the values that it writes are wrong; on a GPU all are right (tests/models/test_fp8_gpu.py)."""
    kernels = interpreted()
    rotated, k, v = filled(TorchKernels(), torch.float8_e4m3fn)
    _, got_k, got_v = filled(kernels, torch.float8_e4m3fn)
    for got, want in ((got_k, k), (got_v, v)):
        near = (got.float() - want.float()).abs() <= 2**-3 * want.float().abs() + 2**-9
        assert float(near.float().mean()) > 0.97
    got = attended(kernels, rotated, k, v)
    torch.testing.assert_close(got, attended(TorchKernels(), rotated, k, v), rtol=1e-4, atol=1e-5)
