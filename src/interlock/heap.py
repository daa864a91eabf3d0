"""Keeps the C heap of a process that runs for months from growing with every new record of its requests.

glibc serves blocks from a threshold on as mappings of their own, which go back to the system when they are
freed, and smaller ones from one contiguous heap, which shrinks only down to its highest block in use. Unless
it is set, the threshold follows the sizes that a program frees, up to 32 MiB (mallopt(3)): then tensors of a
prefill step come from the heap, and each new combination of their sizes leaves it a little higher.
"""

from __future__ import annotations

import ctypes
from typing import Final

MAPPED_FROM_BYTES: Final = 128 << 10
TRIMMED_FROM_BYTES: Final = 4 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names and values of ``malloc.h``."""


def steady_heap() -> bool:
    """Fix both thresholds of this process, where its C library has them; returns whether it does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES), (_M_TRIM_THRESHOLD, TRIMMED_FROM_BYTES))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
