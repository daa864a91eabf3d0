"""Kernel sets by name."""

from __future__ import annotations

from interlock.errors import InterlockError
from interlock.kernels.availability import triton_unavailable
from interlock.kernels.base import Kernels

KERNEL_SETS = ("cpu", "torch", "triton")


def get_kernels(name: str, *, threads: int) -> Kernels:
    """The kernel set ``name``, computing with ``threads`` threads in this process.

    "cpu" compiles its native code on first use (seconds, then cached); "torch" is the reference, which uses
    torch's own thread setting; "triton" computes on an NVIDIA GPU and ignores ``threads``.

    Raises:
        InterlockError: the name is unknown, or the native code cannot be built here (the message says why).
        ValueError: ``threads`` is less than 1.
    """
    if threads < 1:
        raise ValueError(f"threads: must be at least 1, got {threads}")
    if name == "torch":
        from interlock.kernels.torch_reference import TorchKernels

        return TorchKernels()
    if name == "cpu":
        from interlock.kernels.cpu.kernels import CpuKernels

        return CpuKernels(threads=threads)
    if name == "triton":
        problem = triton_unavailable()
        if problem is not None:
            raise InterlockError(problem)
        from interlock.kernels.triton.kernels import TritonKernels

        return TritonKernels()
    raise InterlockError(f'kernels "{name}" are unknown; known kernel sets: {", ".join(KERNEL_SETS)}')
