"""DeepGEMM's kernels compiled at once, by copies of the package, and its dense product for linears."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from threading import Barrier, Event, Lock, get_ident
from types import ModuleType, SimpleNamespace

import pytest
import torch

from interlock.errors import StartupError
from interlock.kernels.triton.tuned_linear import LinearShape, Tiles
from tests.moe.fake_deep_gemm import FakeModule

pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.kernels.triton import compile_ahead, linear
from interlock.kernels.triton.fp8_rows import quantise_rows
from interlock.kernels.triton.kernels import TritonKernels
from interlock.kernels.triton.row_blocks import reference_quantise
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.experts.deep_gemm import copies
from interlock.moe.experts.deep_gemm.library import DeepGemm
from interlock.moe.experts.deep_gemm.runner import DeepGemmRunner
from interlock.moe.experts.deep_gemm.second_copy import load_second_copy

OWN = object()


class Products:
    """Two products that note who was called, in which order, by which thread; copies wait for each other."""

    def __init__(self, *, together: bool) -> None:
        self.met = Barrier(2) if together else None
        self.lock = Lock()
        self.calls: list[tuple[str, bool]] = []
        self.threads: set[int] = set()

    def first(self, library: DeepGemm) -> None:
        self._note("first", library)

    def second(self, library: DeepGemm) -> None:
        self._note("second", library)

    def _note(self, name: str, library: DeepGemm) -> None:
        mine = library.module is OWN
        if self.met is not None and not mine:
            self.met.wait(10)
        with self.lock:
            self.threads.add(get_ident())
            self.calls.append((name, mine))


def test_both_are_compiled_by_copies_at_once_and_then_loaded(monkeypatch) -> None:
    """Neither copy returns before both have begun; the library itself calls them when they are done."""
    monkeypatch.setattr(copies.os, "sched_getaffinity", lambda process: {0, 1})
    library, products = DeepGemm(OWN, lambda: DeepGemm(object())), Products(together=True)
    library.compile_ahead((1,), [products.first, products.second])
    library.finish()
    assert {name for name, _ in products.calls[:2]} == {"first", "second"}
    assert [mine for _, mine in products.calls[:2]] == [False, False]
    assert products.calls[2:] == [("first", True), ("second", True)]
    assert len(products.threads) == 3


def test_a_process_with_one_core_compiles_one_kernel_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(copies.os, "sched_getaffinity", lambda process: {5})
    library, products = DeepGemm(OWN, lambda: DeepGemm(object())), Products(together=False)
    library.compile_ahead((1,), [products.first, products.second])
    library.finish()
    assert products.calls == [("first", False), ("second", False), ("first", True), ("second", True)]
    assert len(products.threads) == 2


def test_a_shape_is_compiled_once() -> None:
    library, products = DeepGemm(OWN), Products(together=False)
    for _ in range(3):
        library.compile_ahead((1,), [products.first, products.second])
    library.compile_ahead((2,), [products.first])
    library.finish()
    assert [name for name, _ in products.calls] == ["first", "second", "first"]


def test_without_a_copy_the_log_says_so_and_both_are_compiled_in_turn(caplog) -> None:
    def not_loaded() -> DeepGemm:
        raise OSError("the folder for temporary files holds no programs")

    library, products = DeepGemm(OWN, not_loaded), Products(together=False)
    with caplog.at_level(logging.INFO, logger="interlock.moe.experts.deep_gemm.copies"):
        library.compile_ahead((1,), [products.first, products.second])
        library.finish()
    assert products.calls == [("first", True), ("second", True)]
    assert "one after the other, since a copy failed: the folder for temporary files" in caplog.text


def test_what_a_copy_cannot_compile_the_library_tells() -> None:
    def fails(library: DeepGemm) -> None:
        raise RuntimeError("nvcc: out of memory")

    library, products = DeepGemm(OWN, lambda: DeepGemm(object())), Products(together=False)
    library.compile_ahead((1,), [products.first, fails])
    with pytest.raises(StartupError, match=r"nvcc: out of memory.*triton_fp8"):
        library.finish()


def test_a_copy_is_another_library_of_the_same_package(monkeypatch, tmp_path) -> None:
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
    source = """
def m_grouped_fp8_gemm_nt_contiguous(a, b, wide=7):
    _C.multiply(a, b, wide)
def fp8_gemm_nt(a):
    _C.multiply(a)
"""
    exec(source, vars(package))
    vars(package).update(_C=load_module(str(tmp_path / "_C.so")), find_cuda_home=lambda: "/cuda")
    products = load_second_copy(package)
    products.m_grouped_fp8_gemm_nt_contiguous(1, b=2)
    products.fp8_gemm_nt(3)
    own, copy = loaded
    assert (own.multiplied, copy.multiplied) == ([], [(1, 2, 7), (3,)])
    assert copy.begun == [(str(tmp_path), "/cuda")]
    assert copy.path.parent != tmp_path
    assert not copy.path.parent.exists()


# ---- the dense product

ROWS, WIDTH, DEPTH = 256, 384, 256


def operands(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x, x_scales = reference_quantise(torch.randn(rows, DEPTH, generator=generator))
    weight = torch.randn(WIDTH, DEPTH, generator=generator).to(torch.float8_e4m3fn)
    return x, x_scales, weight, torch.rand(WIDTH // 128, DEPTH // 128, generator=generator)


def wanted(x, x_scales, weight, scales) -> torch.Tensor:
    left = x.double() * x_scales.T.double().repeat_interleave(128, 1)
    right = weight.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return left @ right.T


def ask(library: DeepGemm, rows: int = ROWS, own=None) -> torch.Tensor | None:
    """Its product of ``operands``; ``own`` is what it is compared with, the exact one by default."""
    return library.dense(*operands(rows), own or (lambda: wanted(*operands(rows)).to(torch.bfloat16)))


@pytest.fixture
def rehearsal(monkeypatch):
    """Switch: whether launches are only rehearsed."""

    def switch(on: bool) -> None:
        token.append(compile_ahead._rehearsing.set(on))

    token: list = []
    yield switch
    while token:
        compile_ahead._rehearsing.reset(token.pop())


def test_it_serves_the_rows_that_were_rehearsed_and_no_others(rehearsal) -> None:
    library = DeepGemm(FakeModule())
    assert ask(library) is None, "nothing was rehearsed"
    rehearsal(True)
    assert ask(library) is None
    rehearsal(False)
    got = ask(library)
    assert got is not None
    want = wanted(*operands())
    assert float((got.double() - want).norm() / want.norm()) < 4e-3
    assert ask(library, 128) is None
    called = {"compiled_dims": "nk", "shape": (ROWS, WIDTH)}
    assert library.module.calls == [("dense", called)] * 2, "once to compile it, once for the result"


@pytest.mark.parametrize("wrong", [1.05, 0.0, float("nan")])
def test_a_product_that_differs_from_our_own_is_not_used(rehearsal, caplog, wrong) -> None:
    library = DeepGemm(FakeModule())
    rehearsal(True)
    ask(library)
    rehearsal(False)
    own = (wanted(*operands()) * wrong).to(torch.bfloat16)
    assert ask(library, own=lambda: own) is own
    assert "256 rows with a weight of 384 x 256 differs from our own" in caplog.text
    assert ask(library, own=lambda: own) is None
    assert len(library.module.calls) == 2, "it was asked again"


@pytest.mark.parametrize("rows", [ROWS - 1, 64])
def test_rows_that_are_no_whole_blocks_are_not_compiled_for(rehearsal, rows) -> None:
    library = DeepGemm(FakeModule())
    rehearsal(True)
    assert ask(library, rows) is None
    rehearsal(False)
    library.finish()
    assert library.module.calls == []


def test_the_first_call_waits_for_its_compiler(rehearsal) -> None:
    held, library = Event(), DeepGemm(FakeModule())
    library.compile_ahead((0,), [lambda _: held.wait(10)])
    rehearsal(True)
    ask(library)
    rehearsal(False)
    assert library.module.calls == []
    held.set()
    assert ask(library) is not None


def test_a_compiler_that_fails_is_told_at_the_first_call(rehearsal) -> None:
    library = DeepGemm(SimpleNamespace())
    rehearsal(True)
    ask(library)
    rehearsal(False)
    with pytest.raises(StartupError, match=r"fp8_gemm_nt.*triton_fp8"):
        ask(library)


@pytest.mark.parametrize(
    ("start", "dtype", "taken"),
    [(ROWS, torch.bfloat16, True), (ROWS + 1, torch.bfloat16, False), (0, torch.bfloat16, False),
     (ROWS, torch.float32, False)],
)  # fmt: skip
def test_the_table_says_from_how_many_rows_a_linear_takes_it(
    monkeypatch, rehearsal, start, dtype, taken
) -> None:
    config = Tiles(256, True, 16, 4, deep_gemm_from=start)
    asked: list[LinearShape] = []
    monkeypatch.setattr(linear, "choose", lambda shape, rows: (asked.append(shape), config)[1])
    own = wanted(*operands()).to(dtype)
    monkeypatch.setattr(linear, "launch", lambda *arguments: own)
    library, kernels = DeepGemm(FakeModule()), TritonKernels()
    kernels.take_dense_products(library)
    x, x_scales, weight, scales = operands()
    packed = kernels.pack_linear_fp8(weight, scales)
    rows = SimpleNamespace(values=x, scales=x_scales, dtype=torch.bfloat16)
    rehearsal(True)
    assert kernels.linear_quantised(rows, packed, out_dtype=dtype) is own, "its own kernels are rehearsed too"
    rehearsal(False)
    out = kernels.linear_quantised(rows, packed, out_dtype=dtype)
    assert (out is own) != taken
    assert asked == [LinearShape(WIDTH, DEPTH, "fp8")] * 2


def test_kernels_without_offers_compute_themselves(monkeypatch) -> None:
    monkeypatch.setattr(linear, "choose", lambda shape, rows: Tiles(256, True, 16, 4, deep_gemm_from=1))
    own = torch.zeros(ROWS, WIDTH)
    monkeypatch.setattr(linear, "launch", lambda *arguments: own)
    x, x_scales, weight, scales = operands()
    kernels = TritonKernels()
    rows = SimpleNamespace(values=x, scales=x_scales, dtype=torch.bfloat16)
    assert kernels.linear_quantised(rows, kernels.pack_linear_fp8(weight, scales)) is own


def test_a_runner_offers_its_library_to_the_kernels_beside_it() -> None:
    library, kernels = DeepGemm(FakeModule()), TritonKernels()
    spec = RunnerSpec(
        num_experts=2,
        hidden_size=256,
        intermediate_size=128,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=kernels,
    )
    DeepGemmRunner(spec, library)
    library.finish()
    assert kernels._products is library


@pytest.mark.gpu
def test_on_a_gpu_it_equals_float64(rehearsal) -> None:
    from interlock.moe.experts.deep_gemm.library import load_deep_gemm

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    try:
        module = load_deep_gemm().module
    except StartupError as problem:
        pytest.skip(str(problem))
    library = DeepGemm(module, lambda: DeepGemm(load_second_copy(module)))
    x, x_scales = quantise_rows(torch.randn(1024, 4096, device="cuda").to(torch.bfloat16))
    weight = torch.randn(13568, 4096, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(106, 32, device="cuda")
    want = wanted(x, x_scales, weight, scales)
    rehearsal(True)
    assert library.dense(x, x_scales, weight, scales, lambda: want) is None
    rehearsal(False)
    got = library.dense(x, x_scales, weight, scales, lambda: want)
    assert got is not None
    assert float((got.double() - want).norm() / want.norm()) < 4e-3
