"""Kernels that only tests compile: plain, broken, with a function as an argument, with a shared function."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def double_kernel(x, out, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


@triton.jit
def broken_kernel(x, block: tl.constexpr):
    tl.store(x + tl.arange(0, block), tl.zeros((block + 1,), tl.float32))


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def apply_kernel(x, block: tl.constexpr, function: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x + at, function(tl.load(x + at)))


FACTOR: tl.constexpr = tl.constexpr(3.0)


@triton.jit
def scaled(x):
    return x * FACTOR


@triton.jit
def scale_kernel(x, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x + at, scaled(tl.load(x + at)))


@triton.jit
def scale_more_kernel(x, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(x + at, scaled(tl.load(x + at)) + 1)
