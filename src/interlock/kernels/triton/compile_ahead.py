"""Compiles the kernels that a forward pass launches, in parallel, before they are launched.

A pass is rehearsed: every launch is turned into a job of ``CompileProcesses``, and nothing is computed by
Triton. New tensors are zero meanwhile, so that what other libraries compute from them stays in range. What
Triton builds for the host side of a launch (a C compiler's run for each signature) is built then too.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from interlock.errors import StartupError
from interlock.kernels.base import CompileReport, CompileShare
from interlock.kernels.triton.compile_jobs import Job, Outcome
from interlock.kernels.triton.compile_processes import CompileProcesses

_ZEROS = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
LAUNCHER_THREADS = 8
SHOWN_SLOWEST = 3

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


def rehearsing() -> bool:
    """Whether this thread is in ``compile_ahead``: what is computed now means nothing."""
    return _rehearsing.get()


def compile_ahead(rehearse: Callable[[], None], processes: CompileProcesses) -> CompileReport:
    """Compile every Triton kernel that ``rehearse`` would launch; its results mean nothing.

    A kernel that other processes cannot find or be told of is compiled here, at its rehearsed launch.

    Raises:
        StartupError: a kernel does not compile, or the compiling process has ended.
    """
    begun = time.monotonic()
    with closing(_Noted(processes)) as noted:
        token = _rehearsing.set(True)
        try:
            with noted.launches(), _Zeros():
                rehearse()
        finally:
            _rehearsing.reset(token)
        rehearsed = time.monotonic()
        outcomes = noted.load()
        slowest = sorted(outcomes, key=lambda pair: pair[1].seconds, reverse=True)[:SHOWN_SLOWEST]
        return CompileReport(
            kernels=len(outcomes),
            rehearsed_seconds=rehearsed - begun,
            waited_seconds=time.monotonic() - rehearsed,
            cpu_seconds=sum(outcome.cpu_seconds for _, outcome in outcomes),
            slowest=tuple((job.name, outcome.seconds) for job, outcome in slowest),
        )


class TritonCompiler:
    """See ``Compiler``."""

    def __init__(self, share: CompileShare) -> None:
        self._processes = CompileProcesses(share)

    def compile_ahead(self, rehearse: Callable[[], None]) -> CompileReport:
        """See ``Compiler.compile_ahead``."""
        return compile_ahead(rehearse, self._processes)

    def close(self) -> None:
        """See ``Compiler.close``."""
        self._processes.close()


class _Noted:
    """The specialisations that were met, and where each goes when it is compiled."""

    def __init__(self, processes: CompileProcesses) -> None:
        self._processes = processes
        self._kernels: dict[int, JITFunction[Any]] = {}
        self._caches: list[tuple[dict[str, Any], str]] = []

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Meanwhile launches launch nothing, and what is not compiled yet becomes a job."""
        launch, hook = JITFunction.run, knobs.runtime.jit_cache_hook

        def compile_only(self, *args, grid, warmup, **kwargs):
            try:
                return launch(self, *args, grid=grid, warmup=True, **kwargs)
            except TypeError:  # constants that JSON cannot hold
                knobs.runtime.jit_cache_hook = hook
                try:
                    return launch(self, *args, grid=grid, warmup=True, **kwargs)
                finally:
                    knobs.runtime.jit_cache_hook = self_note

        self_note = self._note
        JITFunction.run, knobs.runtime.jit_cache_hook = compile_only, self_note
        try:
            yield
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook

    def _note(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's hook before a compilation; True keeps it from compiling."""
        kernel: Any = fn.jit_function
        name = kernel.fn.__qualname__
        found = getattr(sys.modules.get(fn.module), name, None)
        if found is None or found is not kernel:
            return False
        target = driver.active.get_current_target()
        number = len(self._kernels)
        self._kernels[number] = kernel
        cache = kernel.device_caches[compile["device"]][0]
        cache[key] = _PENDING
        self._caches.append((cache, key))
        self._processes.submit(
            Job(
                number=number,
                module=fn.module,
                name=name,
                specialisation=compile["specialization_data"],
                source_key=kernel.cache_key,
                target=(target.backend, target.arch, target.warp_size),
            )
        )
        return True

    def load(self) -> list[tuple[Job, Outcome]]:
        """Wait for all jobs; load each kernel from Triton's cache, and build its launcher, as soon as it is
        there."""
        ended, launchers, locks = [], list[Future[None]](), defaultdict[str, Lock](Lock)
        with ThreadPoolExecutor(LAUNCHER_THREADS, thread_name_prefix="launchers") as threads:
            for job, outcome in self._processes.outcomes():
                if outcome.error:
                    raise StartupError(
                        f"Triton cannot compile {job.module}.{job.name}: {outcome.error}; "
                        f"as it was asked for: {job.specialisation}"
                    )
                compiled = self._kernels[job.number].preload(job.specialisation)
                launchers.append(threads.submit(_build_launcher, compiled, locks[job.name]))
                ended.append((job, outcome))
        for launcher in launchers:
            launcher.result()
        return ended

    def close(self) -> None:
        """Take back what stands for kernels that were never compiled."""
        for cache, key in self._caches:
            if cache.get(key) is _PENDING:
                del cache[key]


_PENDING = object()


def _build_launcher(compiled: Any, lock: Lock) -> None:
    """Into Triton's cache on disk. One at a time of each kernel, whose specialisations often share one."""
    with lock:
        driver.active.launcher_cls(compiled.src, compiled.metadata)


class _Zeros(TorchFunctionMode):
    """Tensors that are usually left uninitialised are zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ZEROS.get(func, func)(*args, **(kwargs or {}))
