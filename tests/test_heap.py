"""Memory that large requests took goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

LEFT_BEHIND = """
import ctypes, os, sys
from interlock.heap import steady_heap

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def filled(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

if sys.argv[1] == "steady":
    assert steady_heap()
libc.free(filled(24 << 20))
before = resident()
large = []
for _ in range(100):
    large.append(filled(400_000))
    filled(64)
for block in large:
    libc.free(block)
print(resident() - before)
"""


def left_behind(how: str) -> int:
    """Resident bytes that are left after 40 MB in 100 blocks, each followed by a small one that is kept."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, how], capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


def test_freed_tensors_leave_nothing_behind() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library of this system has no mallopt")
    assert left_behind("as it comes") > 30_000_000, (
        "the case is one that the allocator handles badly by itself"
    )
    assert left_behind("steady") < 2_000_000
