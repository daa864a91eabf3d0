"""A kernel that reads and does nothing else: what memory gives at most."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, STEPS = 4096, 8


@triton.jit
def _read_kernel(source, out, size, block: tl.constexpr, steps: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * block * steps
    total = tl.zeros([block], tl.int32)
    for step in tl.static_range(steps):
        where = start + step * block + tl.arange(0, block)
        total ^= tl.load(source + where, mask=where < size, other=0)
    tl.store(out + tl.program_id(0), tl.xor_sum(total, axis=0))


def read_all(data: torch.Tensor) -> torch.Tensor:
    """data int32 [n] -> the xor of each stretch of it."""
    programs = -(-data.numel() // (BLOCK * STEPS))
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    _read_kernel[(programs,)](data, out, data.numel(), block=BLOCK, steps=STEPS, num_warps=8)
    return out
