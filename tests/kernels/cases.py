"""Random inputs for kernel tests; everything is drawn from a seeded generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.kernels.base import ExpertRows
from interlock.kernels.cpu.kernels import CpuKernels
from interlock.kernels.torch_reference import TorchKernels

REFERENCE = TorchKernels()
DTYPES = (torch.float32, torch.bfloat16)


def cpu(threads: int = 1) -> CpuKernels:
    return CpuKernels(threads=threads)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, NaN equal to NaN."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


def close(
    actual: torch.Tensor, expected: torch.Tensor, *, rtol: float | None = None, atol: float = 1e-5
) -> None:
    if rtol is None:
        rtol = 1e-2 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def expert_rows(counts: list[int], inputs: int, outputs: int, seed: int = 0) -> ExpertRows:
    """Random rows with ``counts[e]`` rows for expert e; needs ``outputs >= sum(counts)``."""
    total, rng = sum(counts), generator(seed)
    return ExpertRows(
        offsets=torch.tensor([0, *counts]).cumsum(0),
        source=torch.randint(0, max(inputs, 1), (total,), generator=rng),
        target=torch.randperm(outputs, generator=rng)[:total].contiguous(),
        weight=torch.rand(total, generator=rng),
    )


@dataclass
class PagedCase:
    """Sequences with random pages; every slot that no sequence owns is NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    query_start: torch.Tensor
    kv_len: torch.Tensor
    scale: float
    window: int | None
    sinks: torch.Tensor | None

    def arguments(self) -> dict[str, object]:
        names = ("k_cache", "v_cache", "page_table", "query_start", "kv_len", "scale", "window", "sinks")
        return {name: getattr(self, name) for name in names}

    def run(self, kernels: CpuKernels | TorchKernels) -> torch.Tensor:
        return kernels.paged_attention(self.q, **self.arguments())  # type: ignore[arg-type]

    def in_float64(self) -> torch.Tensor:
        arguments = self.arguments() | {name: getattr(self, name).double() for name in ("k_cache", "v_cache")}
        return REFERENCE.paged_attention(self.q.double(), **arguments)  # type: ignore[arg-type]


def paged_case(
    lengths: list[tuple[int, int]],
    *,
    nh: int = 6,
    kvh: int = 2,
    hd: int = 32,
    vd: int = 32,
    page_size: int = 16,
    window: int | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
    seed: int = 0,
    q_scale: float = 1.0,
) -> PagedCase:
    """``lengths``: (queries, keys including the queries) of each sequence."""
    rng = generator(seed)
    cache_dtype = cache_dtype or dtype
    pages_of = [-(-keys // page_size) for _, keys in lengths]
    total = sum(pages_of) + 3
    order = torch.randperm(total, generator=rng).tolist()
    table = torch.full((len(lengths), max([*pages_of, 1]) + 1), -1, dtype=torch.int32)
    k_cache = torch.full((total, page_size, kvh, hd), float("nan"), dtype=cache_dtype)
    v_cache = torch.full((total, page_size, kvh, vd), float("nan"), dtype=cache_dtype)
    for sequence, (queries, keys) in enumerate(lengths):
        first = 0 if window is None else max(0, keys - queries - window + 1)
        for page in range(first // page_size, pages_of[sequence]):
            table[sequence, page] = order.pop()
        for position in range(first, keys):
            page = int(table[sequence, position // page_size])
            k_cache[page, position % page_size] = torch.randn(kvh, hd, generator=rng)
            v_cache[page, position % page_size] = torch.randn(kvh, vd, generator=rng)
    starts = torch.tensor([0, *[queries for queries, _ in lengths]]).cumsum(0).int()
    n = int(starts[-1]) + padding
    return PagedCase(
        q=(torch.randn(n, nh, hd, generator=rng) * q_scale).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=table,
        query_start=starts,
        kv_len=torch.tensor([keys for _, keys in lengths], dtype=torch.int32),
        scale=hd**-0.5,
        window=window,
        sinks=torch.randn(nh, generator=rng) * 3 if sinks else None,
    )
