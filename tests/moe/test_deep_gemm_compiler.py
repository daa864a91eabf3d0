"""Both products of DeepGEMM compiled at once, by two copies of the package."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from threading import Barrier, get_ident
from types import ModuleType, SimpleNamespace

import pytest

from interlock.errors import StartupError

pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.moe.experts.deep_gemm.library import DeepGemm
from interlock.moe.experts.deep_gemm.second_copy import load_second_copy

OWN, COPY = object(), object()


class Products:
    """Two products that note who was called, in which order, by which thread."""

    def __init__(self, *, together: bool) -> None:
        self.met = Barrier(2 if together else 1)
        self.calls: list[tuple[str, object]] = []
        self.threads: set[int] = set()

    def first(self, library: DeepGemm) -> None:
        self.met.wait(10)
        self._note("first", library)

    def second(self, library: DeepGemm) -> None:
        if library.module is COPY:
            self.met.wait(10)
        self._note("second", library)

    def _note(self, name: str, library: DeepGemm) -> None:
        self.threads.add(get_ident())
        self.calls.append((name, library.module))


def test_the_second_product_is_compiled_by_the_copy_beside_the_first() -> None:
    """Neither returns before both have begun; then the library itself loads the second from the cache."""
    library, products = DeepGemm(OWN, lambda: COPY), Products(together=True)
    library.compile_ahead((1,), [products.first, products.second])
    library.finish()
    assert {call[0] + "-" * (call[1] is COPY) for call in products.calls[:2]} == {"first", "second-"}
    assert products.calls[2:] == [("second", OWN)]
    assert len(products.threads) == 2


def test_a_shape_is_compiled_once() -> None:
    library, products = DeepGemm(OWN), Products(together=False)
    for _ in range(3):
        library.compile_ahead((1,), [products.first, products.second])
    library.compile_ahead((2,), [products.first])
    library.finish()
    assert [name for name, _ in products.calls] == ["first", "second", "first"]


def test_without_a_copy_the_log_says_so_and_both_are_compiled_in_turn(caplog) -> None:
    def not_loaded() -> object:
        raise OSError("the folder for temporary files holds no programs")

    library, products = DeepGemm(OWN, not_loaded), Products(together=False)
    with caplog.at_level(logging.INFO, logger="interlock.moe.experts.deep_gemm.library"):
        library.compile_ahead((1,), [products.first, products.second])
        library.finish()
    assert products.calls == [("first", OWN), ("second", OWN)]
    assert "one after the other, since a copy failed: the folder for temporary files" in caplog.text


def test_what_the_copy_cannot_compile_the_library_tells() -> None:
    def fails(library: DeepGemm) -> None:
        raise RuntimeError("nvcc: out of memory")

    library, products = DeepGemm(OWN, lambda: COPY), Products(together=False)
    library.compile_ahead((1,), [products.first, fails])
    with pytest.raises(StartupError, match=r"nvcc: out of memory.*triton_fp8"):
        library.finish()


def test_the_copy_is_another_library_of_the_same_package(monkeypatch, tmp_path) -> None:
    """A stand-in for the loader of compiled modules: each file is its own, and the copy is removed."""
    package = ModuleType("deep_gemm")
    package.__file__ = str(tmp_path / "__init__.py")
    (tmp_path / "_C.so").write_bytes(b"compiled")
    loaded: list[SimpleNamespace] = []

    def load_module(path: str) -> SimpleNamespace:
        assert Path(path).read_bytes() == b"compiled"
        compiled = SimpleNamespace(path=Path(path), begun=[], multiplied=[])
        compiled.init = lambda *where: compiled.begun.append(where)
        compiled.multiply = lambda *operands: compiled.multiplied.append(operands)
        loaded.append(compiled)
        return compiled

    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=load_module))
    source = "def m_grouped_fp8_gemm_nt_contiguous(a, b, wide=7):\n    _C.multiply(a, b, wide)\n"
    exec(source, vars(package))
    vars(package).update(_C=load_module(str(tmp_path / "_C.so")), find_cuda_home=lambda: "/cuda")
    load_second_copy(package).m_grouped_fp8_gemm_nt_contiguous(1, b=2)
    own, copy = loaded
    assert (own.multiplied, copy.multiplied) == ([], [(1, 2, 7)])
    assert copy.begun == [(str(tmp_path), "/cuda")]
    assert copy.path.parent != tmp_path
    assert not copy.path.parent.exists()
