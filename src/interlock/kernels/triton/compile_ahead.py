"""Compiles the kernels that a forward pass launches, in parallel, before they are launched.

A pass is rehearsed: every launch is turned into a compilation on a pool of threads (Triton releases the
interpreter lock in its passes, and its assembler is a process), and nothing is computed by Triton. New
tensors are zero meanwhile, so that what other libraries compute from them stays in range.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

_ZEROS = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


def rehearsing() -> bool:
    """Whether this thread is in ``compile_ahead``: what is computed now means nothing."""
    return _rehearsing.get()


def compile_ahead(rehearse: Callable[[], None]) -> None:
    """Compile every Triton kernel that ``rehearse`` would launch; its results mean nothing.

    Raises:
        triton.CompilationError: a kernel does not compile.
    """
    threads = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(max_workers=threads)
    token = _rehearsing.set(True)
    try:
        with pool, AsyncCompileMode(pool), _launches_compile(), _Zeros():
            rehearse()
    finally:
        _rehearsing.reset(token)


class _Zeros(TorchFunctionMode):
    """Tensors that are usually left uninitialised are zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ZEROS.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _launches_compile() -> Iterator[None]:
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = launch
