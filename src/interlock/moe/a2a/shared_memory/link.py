"""The compiled exchange as ctypes functions, and the structure that tells it where everything lies."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

from interlock.kernels.cpu.build import build_library

MAX_RANKS = 64
OK, WAITING, BAD_ID, STALE, OVERFLOW_ROWS = range(5)


class Link(ctypes.Structure):
    """Kept in step with ``struct Link`` of native/exchange.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("ranks", "rank", "top_k", "num_experts", "local_experts")),
        *((name, c_int64) for name in ("row_bytes", "scale_bytes", "result_bytes")),
        *((name, c_int64) for name in ("dispatch_flags", "return_flags", "mailboxes", "mailbox_bytes")),
        *((name, c_int64) for name in ("mailbox_rows", "mailbox_scales", "results")),
        ("segments", c_void_p * MAX_RANKS),
        ("owner", c_void_p),
        ("local_id", c_void_p),
    )


_POINTER = c_void_p
_OUT = POINTER(c_int64)
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "send": (_POINTER, c_int64, c_int64, _POINTER, c_int64, _POINTER, _POINTER, _POINTER, _OUT),
    "receive": (_POINTER, *[c_int64] * 5, *[_POINTER] * 6, _OUT, _OUT),
    "return": (_POINTER, c_int64, _POINTER, _POINTER, _POINTER, _POINTER),
    "collect": (_POINTER, c_int64, c_int64, _OUT),
}


class Exchange:
    """The C functions with argument types set; each returns a status."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        functions = {}
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"interlock_a2a_{name}")
            function.argtypes = arguments
            function.restype = c_int
            functions[name] = function
        self.send = functions["send"]
        self.receive = functions["receive"]
        self.give_back = functions["return"]
        self.collect = functions["collect"]


@cache
def exchange() -> Exchange:
    """The library of this machine, built on first use (seconds, then cached)."""
    return Exchange(
        build_library(sources=Path(__file__).parent / "native", name="interlock_shared_memory.so")
    )
