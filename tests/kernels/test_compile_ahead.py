"""Kernels compiled by processes of their own for a GPU that is not here. Needs Triton, no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from interlock.errors import StartupError  # noqa: E402
from interlock.kernels.base import CompileShare  # noqa: E402
from interlock.kernels.triton.compile_ahead import compile_ahead, rehearsing  # noqa: E402
from interlock.kernels.triton.compile_jobs import SLOWEST_FIRST, Job, Queue  # noqa: E402
from interlock.kernels.triton.compile_processes import SERVER, CompileProcesses  # noqa: E402
from interlock.kernels.triton.router import top_k  # noqa: E402
from tests.kernels import kernels_to_compile as kernels  # noqa: E402

pytestmark = pytest.mark.skipif(
    knobs.runtime.interpret, reason="Triton's interpreter compiles nothing: run without TRITON_INTERPRET"
)


class Machine:
    """A driver for a Hopper GPU that is not here; what Triton builds for launches is noted."""

    def __init__(self) -> None:
        self.launchers: list[str] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, src, metadata) -> None:
        self.launchers.append(metadata.name)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """The driver, an empty cache, and kernels that were never compiled in this process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    found = Machine()
    monkeypatch.setattr(driver, "_active", found)
    yield found
    for kernel in vars(kernels).values():
        if isinstance(kernel, triton.runtime.jit.JITFunction):
            kernel.device_caches.clear()


@pytest.fixture
def processes():
    started = CompileProcesses(CompileShare(processes=2))
    yield started
    started.close()


@pytest.fixture
def compiled_here():
    """Names of kernels that this process compiled itself, instead of finding them on disk."""
    names: list[str] = []

    def note(*, src, cache_hit, **_) -> None:
        if not cache_hit:
            names.append(src.fn.__name__)

    knobs.compilation.listener = note
    yield names
    knobs.compilation.listener = None


def double(x: torch.Tensor, block: int) -> None:
    kernels.double_kernel[(1,)](x, torch.empty_like(x), x.numel(), block=block)


def cached(kernel) -> list[object]:
    return list(kernel.device_caches[0][0].values())


def test_what_is_rehearsed_is_compiled_elsewhere(machine, processes, compiled_here) -> None:
    seen: list[bool] = []

    def rehearse() -> None:
        seen.append(rehearsing())
        for block in (64, 128, 64):
            double(torch.ones(3), block)

    report = compile_ahead(rehearse, processes)
    assert seen == [True]
    assert not rehearsing()
    assert report.kernels == 2
    assert compiled_here == []
    assert [kernel.metadata.name for kernel in cached(kernels.double_kernel)] == ["double_kernel"] * 2
    assert machine.launchers == ["double_kernel"] * 2
    assert report.cpu_seconds > 0
    assert [name for name, _ in report.slowest] == ["double_kernel"] * 2
    found = kernels.double_kernel.warmup(torch.ones(3), torch.ones(3), 3, block=64, grid=(1,))
    assert found in cached(kernels.double_kernel), "a real launch compiles it again"


def test_kernels_that_share_a_function_with_a_constant_are_found(machine, processes, compiled_here) -> None:
    """Triton's hash of the second differs from the one it gets in a process that has not met the first."""

    def rehearse() -> None:
        kernels.scale_kernel[(1,)](torch.ones(16), block=16)
        kernels.scale_more_kernel[(1,)](torch.ones(16), block=16)

    assert compile_ahead(rehearse, processes).kernels == 2
    assert compiled_here == []


def test_new_tensors_are_zero_while_rehearsing(machine, processes) -> None:
    made: list[torch.Tensor] = []

    def rehearse() -> None:
        made.extend((torch.empty(1000), torch.ones(3).new_empty(500), torch.empty_like(torch.ones(100))))

    assert compile_ahead(rehearse, processes).kernels == 0
    assert all(bool((tensor == 0).all()) for tensor in made)


def test_a_kernel_that_is_not_compiled_is_an_error_with_the_reason(machine, processes) -> None:
    def rehearse() -> None:
        kernels.broken_kernel[(1,)](torch.ones(8), block=8)

    with pytest.raises(StartupError, match=r"(?s)broken_kernel.*power of 2"):
        compile_ahead(rehearse, processes)
    assert cached(kernels.broken_kernel) == [], "something that is no kernel would be launched"


def test_what_no_other_process_can_be_told_is_compiled_here(machine, processes, compiled_here) -> None:
    def rehearse() -> None:
        kernels.apply_kernel[(1,)](torch.ones(16), block=16, function=kernels.plus_one)
        double(torch.ones(3), 32)

    compiled_elsewhere = compile_ahead(rehearse, processes).kernels
    assert (compiled_elsewhere, compiled_here) in [
        (1, ["apply_kernel"]),
        (2, []),  # Triton 3.9 can tell of a function
    ]
    assert cached(kernels.apply_kernel)
    assert cached(kernels.double_kernel)


def test_a_compiling_process_that_dies_is_told(machine, processes) -> None:
    os.kill(processes._server.pid, signal.SIGKILL)
    with pytest.raises(StartupError, match=r"exit code -9 before it had compiled double_kernel"):
        compile_ahead(lambda: double(torch.ones(3), 256), processes)
    assert cached(kernels.double_kernel) == []


def test_launches_are_real_again_after_a_rehearsal_that_fails(machine, processes) -> None:
    launch = triton.runtime.jit.JITFunction.run

    def fail() -> None:
        double(torch.ones(3), 512)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        compile_ahead(fail, processes)
    assert triton.runtime.jit.JITFunction.run is launch
    assert knobs.runtime.jit_cache_hook is None
    assert not rehearsing()
    assert cached(kernels.double_kernel) == []


def test_the_server_ends_with_its_input() -> None:
    """However a rank dies: nothing is left over."""
    server = subprocess.Popen(
        [sys.executable, "-m", SERVER, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(60) == 0


def job(number: int, name: str) -> Job:
    return Job(
        number=number,
        module="m",
        name=name,
        specialisation=f"{number}",
        source_key="",
        target=("cuda", 90, 32),
    )


def test_ranks_of_a_machine_begin_with_different_kernels() -> None:
    """Each is the first that one rank compiles of its part, and every rank gets them all."""
    orders = []
    for rank in range(3):
        waiting = Queue(CompileShare(processes=1, rank=rank, ranks=3))
        for number in range(60):
            waiting.put(job(number, "a_kernel"))
        orders.append([waiting.take().number for _ in range(60)])
    assert all(sorted(order) == list(range(60)) for order in orders)
    first = [set(order[:10]) for order in orders]
    assert not first[0] & first[1] | first[1] & first[2] | first[0] & first[2]


def test_a_rehearsal_chooses_experts_of_all_ranks(machine, processes) -> None:
    chosen: list[torch.Tensor] = []

    def rehearse() -> None:
        chosen.append(top_k(torch.zeros(4, 64), None, 8, sigmoid=True, normalise=True)[0])

    assert compile_ahead(rehearse, processes).kernels == 1
    assert chosen[0].flatten().unique().tolist() == list(range(0, 64, 2))


def test_those_that_take_longest_are_compiled_first() -> None:
    waiting = Queue(CompileShare(processes=1))
    names = ["norm_kernel", SLOWEST_FIRST[1], "rope_kernel", SLOWEST_FIRST[0]]
    for number, name in enumerate(names):
        waiting.put(job(number, name))
    assert [waiting.take().name for _ in names] == [*SLOWEST_FIRST[:2], "norm_kernel", "rope_kernel"]
    assert len(waiting) == 0


def test_slow_kernels_exist_under_their_names() -> None:
    from interlock.kernels.triton import attention_kernels, linear_tiles, pipelined_attention, pipelined_gemm

    homes = (attention_kernels, linear_tiles, pipelined_attention, pipelined_gemm)
    assert all(any(hasattr(home, name) for home in homes) for name in SLOWEST_FIRST)


def test_a_module_that_cannot_be_imported_is_an_outcome(machine, processes) -> None:
    processes.submit(
        Job(
            number=0,
            module="no_such_module",
            name="k",
            specialisation="{}",
            source_key="",
            target=("cuda", 90, 32),
        )
    )
    [(job, outcome)] = processes.outcomes()
    assert job.number == 0
    assert "no_such_module cannot be imported" in outcome.error
