"""The suite passes for every built-in backend and runner, and fails for backends with a known fault."""

from __future__ import annotations

import pytest

from interlock.errors import InterlockError
from interlock.kernels.availability import native_cpu_unavailable
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.conformance import run
from interlock.moe.conformance.suite import run_conformance
from interlock.moe.experts.registry import expert_runners

BACKENDS = ("none", "collective", "shared_memory")
RUNNERS = ("torch", "cpu")
EXCHANGE_COVERAGE = (
    *("contiguous", "masked", "float32", "bfloat16", "fp8", "prefill", "decode", "uneven experts"),
    *("uniform", "one expert", "one rank", "unused slots", "all unused"),
    *("n = 0 on a rank", "n = 1 on a rank", "n = T - 1 on a rank", "n = T on a rank", "all ranks idle"),
    *("misuse: n > T", "misuse: dispatch before combine", "misuse: combine twice"),
)


def skip_without_compiler(name: str) -> None:
    backend, runner = a2a_backends().entries.get(name), expert_runners().entries.get(name)
    needs_it = (backend and backend.native) or (runner and "cpu" in runner.kernels)
    if needs_it and native_cpu_unavailable():
        pytest.skip(str(native_cpu_unavailable()))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", BACKENDS)
def test_backend(name: str, ranks: int) -> None:
    """B01, B02, B07, B10, B11, B14, B15, B23, B28: 100 random cases, rows, counts and sums as the oracle's.

    Ranks without tokens, ranks that receive nothing, all tokens to one expert or one rank, unwritten slots
    and idle tokens full of NaN, hidden sizes that are no multiple of 128, ids of another dtype, and a
    dispatcher that goes on after misuse, in buffers never rebuilt.
    """
    skip_without_compiler(name)
    report = run_conformance(f"a2a:{name}", ranks=ranks, cases=100, seed=ranks)
    assert report.passed, report.text()
    assert report.cases == 100
    if name != "none":
        # With one rank no expert is uneven, and every token goes to "one rank".
        wanted = [what for what in EXCHANGE_COVERAGE if ranks > 1 or what != "uneven experts"]
        assert [what for what in wanted if not report.coverage.get(what)] == []


def test_fp8_runner() -> None:
    """B27, A05: blocks as a checkpoint has them, rows as bfloat16, float32 and fp8, in every layout."""
    report = run_conformance("runner:torch_fp8", cases=160, seed=5)
    assert report.passed, report.text()
    wanted = ("replicated", "contiguous", "masked", "float32", "bfloat16", "fp8", "fp8 experts")
    assert [what for what in wanted if not report.coverage.get(what)] == []


@pytest.mark.parametrize("name", RUNNERS)
def test_runner(name: str) -> None:
    """B10, B27, A05: integer-valued experts exactly, random ones closely, in every layout, NaN around."""
    skip_without_compiler(name)
    report = run_conformance(f"runner:{name}", cases=240, seed=5)
    assert report.passed, report.text()
    assert report.cases == 240
    wanted = ("replicated", "contiguous", "masked", "float32", "bfloat16", "fp8", "exact experts")
    assert [what for what in wanted if not report.coverage.get(what)] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", BACKENDS)
def test_backend_long(name: str, ranks: int) -> None:
    """15 x 1,400 = 21,000 random cases over all built-in backends."""
    skip_without_compiler(name)
    report = run_conformance(f"a2a:{name}", ranks=ranks, cases=1400, seed=1000 + ranks)
    assert report.passed, report.text()
    assert report.cases == 1400


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNERS)
def test_runner_long(name: str) -> None:
    skip_without_compiler(name)
    report = run_conformance(f"runner:{name}", cases=5000, seed=77)
    assert report.passed, report.text()


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(InterlockError, match=r"'telepathy'; known: .*collective, cpu, deep_gemm, .*torch"):
        run_conformance("telepathy")
    with pytest.raises(InterlockError, match=r"runs on cpu, not on cuda|no CUDA device"):
        run_conformance("shared_memory", device="cuda")
    with pytest.raises(InterlockError, match="not on 65"):
        run_conformance("shared_memory", ranks=65)


def test_the_verb_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("runner:torch", ranks=None, device="cpu", cases=8, seed=0) == 0
    printed = capsys.readouterr().out
    assert "expert runner torch: passed" in printed
    assert "8 random cases" in printed
