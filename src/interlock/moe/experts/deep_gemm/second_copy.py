"""Another copy of the package's compiled part, so that several kernels can be compiled at once.

The package has no locks around what it remembers, and a library is loaded once for each file. A copy of the
file is loaded as another library with memory of its own; they share only the cache on disk, into which
kernels are renamed when they are complete, as several processes would.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType, SimpleNamespace

COMPILED = "_C.so"
PRODUCTS = ("m_grouped_fp8_gemm_nt_contiguous", "fp8_gemm_nt")


def load_second_copy(package: ModuleType) -> SimpleNamespace:
    """The products that are compiled ahead, computed by another copy; the copied file is gone again.

    Raises:
        OSError: it cannot be copied.
        Exception: of any kind, if it cannot be loaded or is not built as this file expects.
    """
    import tvm_ffi

    assert package.__file__ is not None
    folder = Path(package.__file__).parent
    with TemporaryDirectory(prefix="interlock-deep-gemm-") as elsewhere:
        compiled = tvm_ffi.load_module(shutil.copy(folder / COMPILED, elsewhere))
    compiled.init(str(folder), package.find_cuda_home())
    return SimpleNamespace(**{name: _calling(getattr(package, name), compiled) for name in PRODUCTS})


def _calling(wrapper: FunctionType, compiled: object) -> FunctionType:
    """The package's Python function, calling ``compiled`` instead of the package's own."""
    return FunctionType(
        wrapper.__code__,
        {**wrapper.__globals__, "_C": compiled},
        wrapper.__name__,
        wrapper.__defaults__,
        wrapper.__closure__,
    )
