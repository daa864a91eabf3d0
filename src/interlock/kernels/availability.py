"""Which kernel sets can run on this machine. Light: no torch, so that the planner may ask."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterable

COMPILER_NAMES = ("c++", "g++", "clang++")


def find_compiler() -> str | None:
    """Path of the first C++ compiler on PATH among ``c++``, ``g++`` and ``clang++``."""
    return next((path for name in COMPILER_NAMES if (path := shutil.which(name))), None)


def native_cpu_unavailable() -> str | None:
    """Why the kernel set "cpu" cannot be built here, with what to install; None when it can."""
    if sys.platform not in ("linux", "darwin"):
        return f'kernels "cpu" need Linux or macOS, this is {platform.system()}; kernels "torch" run anywhere'
    if find_compiler() is None:
        return (
            'kernels "cpu" are compiled on first use and no C++ compiler '
            f"({', '.join(COMPILER_NAMES)}) is on PATH; "
            'install one (Debian or Ubuntu: "apt-get install g++", Fedora: "dnf install gcc-c++", '
            'macOS: "xcode-select --install"), or use kernels "torch", which are slower'
        )
    return None


def triton_unavailable() -> str | None:
    """Why the kernel set "triton" cannot be imported here; None when it can. Says nothing about GPUs."""
    if importlib.util.find_spec("triton") is None:
        return (
            'kernels "triton" need the package triton, which comes with the CUDA builds of torch '
            '(a CPU build brings none); kernels "cpu" and "torch" run without a GPU'
        )
    return None


MIN_CAPABILITY = (8, 0)
"""Least compute capability of a GPU that the Triton kernels are written for (bfloat16 tensor cores)."""


def capability_of(text: str) -> tuple[int, int]:
    """``"9.0"`` -> ``(9, 0)``; (0, 0) where the driver tells none."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else (0, 0)


def triton_problem(version: str | None, capabilities: Iterable[str]) -> str | None:
    """Why the kernel set "triton" cannot compute on a machine, or None.

    Args:
        version: of the package triton there, None where it is not installed.
        capabilities: compute capability of each GPU that is to be used, such as "9.0".
    """
    if version is None:
        return "they need the package triton, which comes with the CUDA builds of torch and is not installed"
    for capability in capabilities:
        if capability_of(capability) < MIN_CAPABILITY:
            least = ".".join(map(str, MIN_CAPABILITY))
            found = capability or "none"
            return f"they need a GPU of compute capability {least} or more, and one has {found}"
    return None
