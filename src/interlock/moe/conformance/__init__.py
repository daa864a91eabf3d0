"""Conformance: random cases against a loop oracle, for every registered a2a backend and expert runner."""

from __future__ import annotations

DEFAULT_RANKS = (1, 2, 4)
DEFAULT_CASES = 300


def run(name: str, *, ranks: int | None, device: str, cases: int | None, seed: int) -> int:
    """``interlock conformance NAME``: print a report for each number of ranks; exit code 0 when all passed.

    Args:
        ranks: None runs a backend on 1, 2 and 4 ranks, as far as it declares them.
        cases: random cases for each number of ranks.
    """
    from interlock.moe.a2a.registry import a2a_backends
    from interlock.moe.conformance.suite import run_conformance

    backend = a2a_backends().entries.get(name.removeprefix("a2a:"))
    if ranks is not None or backend is None:
        sizes = [ranks or 1]
    else:
        most = backend.max_ranks or max(DEFAULT_RANKS)
        sizes = [size for size in DEFAULT_RANKS if backend.min_ranks <= size <= most] or [backend.min_ranks]
    passed = True
    for size in sizes:
        report = run_conformance(name, ranks=size, device=device, cases=cases or DEFAULT_CASES, seed=seed)
        print(report.text(), flush=True)
        passed = passed and report.passed
    return 0 if passed else 1
