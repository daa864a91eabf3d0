"""The compiled kernels as ctypes functions, and the meaning of their status codes."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NoReturn

from interlock.kernels.cpu.build import build_library

SIGNATURES: dict[str, tuple[type, ...]] = {
    "pack_linear": (c_void_p, c_int, c_int64, c_int64, c_int64, c_void_p),
    "linear": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, *[c_int] * 4),
    "rms_norm": (c_void_p, *[c_int64] * 5, c_void_p, c_float, c_void_p, *[c_int] * 3),
    "add_rms_norm": (
        *(c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64),
        *(c_void_p, c_float, c_void_p, c_void_p, c_int, c_int, c_int),
    ),
    "silu_and_mul": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int, c_int),
    "sum_lanes": (c_void_p, c_int64, c_int64, c_void_p, *[c_int64] * 3, c_void_p, *[c_int] * 3),
    "rope_and_store": (
        *(c_void_p, c_int64, c_int64) * 3,
        *[c_int64] * 5,
        *(c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
        *(c_float, c_void_p, c_int, c_int, c_int),
    ),
    "paged_attention": (
        *(c_void_p, *[c_int64] * 5),
        *(c_void_p, c_void_p, *[c_int64] * 4),
        *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64),
        *(c_float, c_int64, c_void_p, c_void_p, c_int, c_int, c_int),
    ),
    "pack_experts": (c_void_p, c_void_p, c_int, *[c_int64] * 3, c_void_p, c_void_p),
    "expert_mlp": (
        *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, *[c_int64] * 3),
        *(c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_int64, c_int64, *[c_int] * 4),
    ),
}

STATUS_MESSAGES = {
    1: "positions: every position must be in [0, rows of cos_sin)",
    2: "slots: every slot must be -1 or in [0, pages * page_size)",
    3: "query_start: must begin with 0, never fall, and end at most at the number of rows of q",
    4: "kv_len: must cover the sequence's queries and fit its row of page_table",
    5: "page_table: a page that a query sees is -1 or beyond the cache",
    6: "rows.offsets: must begin at 0 or later, never fall, and end at most at the number of listed rows",
    7: "rows.source: names a row outside x",
    8: "rows.target: names a row outside out",
}


class NativeLibrary:
    """The C functions, one attribute each, with argument types set. All return a status, 0 for success."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = ctypes.CDLL(str(path))
        for name, argument_types in SIGNATURES.items():
            function = getattr(loaded, f"interlock_{name}")
            function.argtypes = argument_types
            function.restype = c_int
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(f"the native library has no function {name}")


@cache
def native_library() -> NativeLibrary:
    """The library of this machine, built on first use."""
    return NativeLibrary(build_library())


def raise_status(status: int) -> NoReturn:
    """Raise the ValueError that a non-zero status stands for."""
    raise ValueError(STATUS_MESSAGES[status])
