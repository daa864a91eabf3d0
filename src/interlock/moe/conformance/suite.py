"""The conformance suite of any registered a2a backend or expert runner, other packages' included."""

from __future__ import annotations

from collections import Counter

import torch

from interlock.errors import InterlockError, Refusal
from interlock.kernels.registry import get_kernels
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.conformance.backend_suite import MAX_FAILURES, RankFindings, run_backend_suite
from interlock.moe.conformance.processes import Gpus, run_ranks
from interlock.moe.conformance.report import ConformanceReport
from interlock.moe.conformance.runner_suite import run_runner_suite
from interlock.moe.experts.registry import expert_runners
from interlock.parallel.topology import Groups


def run_conformance(
    name: str, *, ranks: int = 2, device: str = "cpu", cases: int = 300, seed: int = 0
) -> ConformanceReport:
    """Run the suite against the backend (on ``ranks`` processes) or runner (in one) called ``name``.

    A name that is both is taken as a backend first; say "runner:NAME" or "a2a:NAME" to choose.

    Raises:
        InterlockError: the name is unknown or broken, or it cannot run on ``device`` or ``ranks``.
    """
    kind, _, plain = name.rpartition(":")
    backends, runners = a2a_backends(), expert_runners()
    if kind not in ("", "a2a", "runner"):
        raise InterlockError(f"{name!r}: write a2a:NAME or runner:NAME")
    if device == "cuda" and not torch.cuda.is_available():
        raise InterlockError("--device cuda: this torch sees no CUDA device")
    if kind != "runner" and (plain in backends.entries or plain in backends.broken):
        return _run_backend(plain, ranks, device, cases, seed)
    if kind != "a2a" and (plain in runners.entries or plain in runners.broken):
        return _run_runner(plain, device, cases, seed)
    known = sorted(backends.entries.keys() | runners.entries.keys())
    raise InterlockError(f"no a2a backend or expert runner is called {plain!r}; known: {', '.join(known)}")


def _run_backend(name: str, ranks: int, device: str, cases: int, seed: int) -> ConformanceReport:
    backend = a2a_backends().get(name)
    if device not in backend.devices:
        raise InterlockError(f"{name} runs on {', '.join(sorted(backend.devices))}, not on {device}")
    if not backend.min_ranks <= ranks <= (backend.max_ranks or ranks):
        raise InterlockError(
            f"{name} runs on {backend.min_ranks} to {backend.max_ranks} ranks, not on {ranks}"
        )
    gpus = Gpus.here(ranks) if device == "cuda" else None
    sharing = gpus.per_gpu if gpus else 1
    patience = (120 + cases * 0.5) * sharing
    try:
        findings = run_ranks(
            backend_rank, ranks, name, device, cases, seed, sharing,
            gpus=gpus, timeout=patience, collective_timeout=60.0 * sharing,
        )  # fmt: skip
    except Refusal:
        raise
    except InterlockError as error:
        findings = [RankFindings(failures=[str(error)])]
    # Ranks see the same cases and each its own mismatches.
    failures = [failure for finding in findings for failure in finding.failures]
    return ConformanceReport(
        name=name,
        kind="a2a backend",
        ranks=ranks,
        device=device,
        seed=seed,
        cases=min(finding.cases for finding in findings),
        checks=sum(finding.checks for finding in findings),
        seconds=max(finding.seconds for finding in findings),
        failures=tuple(failures[:MAX_FAILURES]),
        coverage=dict(findings[0].coverage),
        notice=gpus.notice if gpus else "",
    )


def backend_rank(
    groups: Groups, name: str, device: str, cases: int, seed: int, ranks_per_gpu: int
) -> RankFindings:
    """One rank's share of a backend suite; a function of this module so that processes can import it."""
    backend = a2a_backends().get(name)
    return run_backend_suite(
        backend, groups, device=device, cases=cases, seed=seed, ranks_per_gpu=ranks_per_gpu
    )


def _run_runner(name: str, device: str, cases: int, seed: int) -> ConformanceReport:
    runner = expert_runners().get(name)
    if device not in runner.devices:
        raise InterlockError(f"{name} runs on {', '.join(sorted(runner.devices))}, not on {device}")
    names = sorted(runner.kernels) or ["torch"]
    total: Counter[str] = Counter()
    findings = []
    with torch.inference_mode():
        for index, kernels in enumerate(names):
            share = cases // len(names) + (index < cases % len(names))
            found = run_runner_suite(
                runner, get_kernels(kernels, threads=1), device=device, cases=share, seed=seed + index
            )
            total.update(found.coverage)
            total[f"kernels {kernels}"] += found.cases
            findings.append(found)
    return ConformanceReport(
        name=name,
        kind="expert runner",
        ranks=1,
        device=device,
        seed=seed,
        cases=sum(found.cases for found in findings),
        checks=sum(found.checks for found in findings),
        seconds=sum(found.seconds for found in findings),
        failures=tuple(failure for found in findings for failure in found.failures)[:MAX_FAILURES],
        coverage=dict(total),
    )
