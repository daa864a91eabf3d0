"""The runners around DeepGEMM: on a GPU with the package, else interpreted (``TRITON_INTERPRET=1``) with its
emulation."""

from __future__ import annotations

from threading import Event, Timer

import pytest
import torch

from interlock.errors import StartupError
from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.a2a.rows import ContiguousRows, MaskedRows, ReplicatedRows
from interlock.moe.experts.base import RunnerSpec, SumsLanes
from interlock.moe.layouts import aligned_segments, positions
from tests.kernels.triton_cases import random_routes, reference_lanes, relative
from tests.moe.fake_deep_gemm import FakeModule

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.kernels.triton.compile_ahead import TritonCompiler  # noqa: E402
from interlock.moe.experts.deep_gemm import RUNNER  # noqa: E402
from interlock.moe.experts.deep_gemm.library import DeepGemm, load_deep_gemm  # noqa: E402
from interlock.moe.experts.deep_gemm.runner import DeepGemmRunner  # noqa: E402
from interlock.moe.experts.fastest_fp8.runner import FastestFp8Runner  # noqa: E402
from interlock.moe.experts.triton_fp8.runner import TritonFp8Runner  # noqa: E402
from interlock.moe.fp8_rows import quantise_rows  # noqa: E402

EXPERTS, HIDDEN, WIDTH, K = 4, 256, 136, 2
BF16 = torch.bfloat16
BOUND = 0.15 if triton.knobs.runtime.interpret else 1e-2
"""Triton's interpreter loses carries in casts to e4m3."""


@pytest.fixture
def library() -> DeepGemm:
    """The package on a GPU, its emulation under the interpreter."""
    if triton.knobs.runtime.interpret:
        return DeepGemm(FakeModule())
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    try:
        return DeepGemm(load_deep_gemm().module)
    except StartupError as problem:
        pytest.skip(str(problem))


def loaded(library: DeepGemm, kind=DeepGemmRunner) -> tuple[DeepGemmRunner, str]:
    where = "cpu" if isinstance(library.module, FakeModule) else "cuda"
    spec = RunnerSpec(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        dtype=BF16,
        device=torch.device(where),
        kernels=TorchKernels(),
    )
    runner = kind(spec, library)
    generator = torch.Generator().manual_seed(5)
    for expert in range(EXPERTS):
        shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
        runner.load_expert(expert, *(torch.randn(s, generator=generator) * 0.1 for s in shapes))
    runner.finish_loading()
    return runner, where


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_replicated_rows(library, fp8) -> None:
    runner, where = loaded(library)
    ids, weights = random_routes(21, K, EXPERTS, device=where, unused=0.3)
    x = torch.randn(21, HIDDEN, device=where).to(BF16)
    want = reference_lanes(x, ids, weights, runner._tensors, rounds_gate_up=RUNNER.rounds_gate_up)
    values, scales = quantise_rows(x) if fp8 else (x, None)
    rows = ReplicatedRows(values, ids, weights, scales, sums=torch.float32)
    live = ids >= 0
    assert relative(runner.run(rows)[live], want[live]) < BOUND
    assert isinstance(runner, SumsLanes)
    summed = runner.run_summed(rows, torch.float32)
    assert relative(summed, want.sum(1)) < BOUND
    assert bool((summed[(ids < 0).all(1)] == 0).all())
    assert runner.observed().calls == 2


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("slab_rows", [40, 37, 128])
def test_grouped_rows(library, layout, fp8, slab_rows) -> None:
    runner, where = loaded(library)
    experts = torch.tensor([3, 0, 3, 3, 1, 0, 3], device=where)
    x = torch.randn(len(experts), HIDDEN, device=where).to(BF16)
    counts = torch.bincount(experts, minlength=EXPERTS)
    if layout == "contiguous":
        segments = aligned_segments(counts, 128)
        at, total = positions(experts, segments), segments.rows
    else:
        rank = torch.tensor([int((experts[:lane] == experts[lane]).sum()) for lane in range(len(experts))])
        at, total = experts * slab_rows + rank.to(where), EXPERTS * slab_rows
    data = torch.full((total, HIDDEN), float("nan"), dtype=BF16, device=where)
    data[at] = x
    weights = torch.rand(total, device=where)
    values, scales = quantise_rows(data) if fp8 else (data, None)
    if layout == "contiguous":
        rows = ContiguousRows(values, segments.psum.int(), counts.int(), 128, weights, scales)
    else:
        lead = (EXPERTS, slab_rows)
        rows = MaskedRows(
            values.view(*lead, HIDDEN),
            counts.int(),
            weights.view(lead),
            None if scales is None else scales.view(*lead, -1),
            torch.empty(*lead, HIDDEN, dtype=BF16, device=where),
        )
    out = runner.run(rows)
    if isinstance(rows, MaskedRows) and slab_rows % 128 == 0:
        assert out is rows.results, "whole blocks are left where the exchange reads them"
    got = out.view(total, HIDDEN)[at]
    want = reference_lanes(
        x, experts[:, None], weights[at][:, None], runner._tensors, rounds_gate_up=RUNNER.rounds_gate_up
    )[:, 0]
    assert relative(got, want) < BOUND


@pytest.mark.gpu
def test_no_rows(library) -> None:
    """Both products run once beside loading, so that none is compiled while serving."""
    runner, where = loaded(library)
    library.finish()
    if isinstance(library.module, FakeModule):
        assert [kind for kind, _ in library.module.calls] == ["contiguous", "contiguous"]
    empty = torch.empty(0, HIDDEN, dtype=BF16, device=where)
    ids = torch.empty(0, K, dtype=torch.int64, device=where)
    rows = ReplicatedRows(empty, ids, torch.empty(0, K, device=where))
    assert runner.run(rows).shape == (0, K, HIDDEN)
    assert runner.run_summed(rows, BF16).shape == (0, HIDDEN)


@pytest.mark.gpu
def test_rows_decide_which_way_the_weights_are_read(library, monkeypatch) -> None:
    runner, where = loaded(library, FastestFp8Runner)
    wanted = "deep_gemm"
    monkeypatch.setattr("interlock.moe.experts.fastest_fp8.runner.pick", lambda *arguments: wanted)
    ids, weights = random_routes(9, K, EXPERTS, device=where)
    x = torch.randn(9, HIDDEN, device=where).to(BF16)
    summed = runner.run_summed(ReplicatedRows(x, ids, weights), torch.float32)
    want = reference_lanes(x, ids, weights, runner._tensors, rounds_gate_up=RUNNER.rounds_gate_up)
    assert relative(summed, want.sum(1)) < BOUND
    assert runner.observed().extra["calls_by_runner"] == {"triton_fp8": 0, "deep_gemm": 1}
    assert runner.observed().name == "fastest_fp8"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [DeepGemmRunner, FastestFp8Runner])
def test_the_first_call_that_is_no_rehearsal_waits_for_the_compiler(library, kind, monkeypatch) -> None:
    """Whichever way it takes: a capture that follows must not meet the compiler's calls."""
    if isinstance(library.module, FakeModule):
        nothing = torch.zeros(3, K, HIDDEN, dtype=BF16)
        monkeypatch.setattr(TritonFp8Runner, "run", lambda self, rows: nothing)
    held, compiled = Event(), []
    library.compile_ahead((0,), [lambda _: compiled.append(held.wait(60))])
    runner, where = loaded(library, kind)
    ids, weights = random_routes(3, K, EXPERTS, device=where)
    rows = ReplicatedRows(torch.randn(3, HIDDEN, device=where).to(BF16), ids, weights)
    if not isinstance(library.module, FakeModule):
        compiler = TritonCompiler(4)
        compiler.compile_ahead(lambda: runner.run_summed(rows, BF16))
        compiler.close()
    assert compiled == []
    Timer(0.1, held.set).start()
    runner.run_summed(rows, BF16)
    assert compiled == [True]


@pytest.mark.gpu
def test_what_cannot_be_compiled_is_told(library) -> None:
    library = DeepGemm(library.module)

    def fail(_: DeepGemm) -> None:
        raise RuntimeError("no nvcc here")

    library.compile_ahead((0,), [fail, fail])
    with pytest.raises(StartupError, match=r"no nvcc here.*triton_fp8"):
        library.finish()
