"""A second copy of the package's compiled part, so that two of its kernels can be compiled at once.

The package has no locks around what it remembers, and a library is loaded once for each file. A copy of the
file is loaded as another library with memory of its own; the two share only the cache on disk, into which
kernels are renamed when they are complete, as several processes would.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType, SimpleNamespace

COMPILED = "_C.so"
PRODUCT = "m_grouped_fp8_gemm_nt_contiguous"


def load_second_copy(package: ModuleType) -> SimpleNamespace:
    """The product for aligned segments, computed by the second copy; the copied file is gone again.

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
    wrapper: FunctionType = getattr(package, PRODUCT)
    calls_the_copy = FunctionType(
        wrapper.__code__,
        {**wrapper.__globals__, "_C": compiled},
        wrapper.__name__,
        wrapper.__defaults__,
        wrapper.__closure__,
    )
    return SimpleNamespace(**{PRODUCT: calls_the_copy})
