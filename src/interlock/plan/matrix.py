"""Which a2a backend, runner, phase and weight format work together on this machine, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING

import msgspec

from interlock.moe.terms import Phase
from interlock.plan.attention import backend_problem
from interlock.plan.facts import MachineFacts
from interlock.plan.join import (
    Declarations,
    Situation,
    a2a_problem,
    exchanges,
    runner_problem,
    shared_layout,
)

if TYPE_CHECKING:
    from interlock.moe.a2a.backend import A2ABackend
    from interlock.nn.attention_backends.base import AttentionBackend


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination. ``problem`` is None where it is ready; ``layout`` is the one it would use."""

    a2a: str
    runner: str
    phase: str
    weight_format: str
    layout: str | None
    problem: str | None


def matrix(declared: Declarations, facts: MachineFacts, *, device: str, kernels: str) -> Iterator[Cell]:
    """Every combination of what is registered, for one node and a hidden size that suits both."""
    formats = sorted({name for runner in declared.runners.values() for name in runner.weight_formats})
    for backend in declared.a2a.values():
        for runner in declared.runners.values():
            for weight_format in formats:
                here = Situation(
                    device=device,
                    kernels=kernels,
                    dtype="float32" if weight_format == "float32" else "bfloat16",
                    weight_format=weight_format,
                    hidden_size=max(backend.hidden_sizes, default=0)
                    or lcm(backend.hidden_multiple, runner.hidden_multiple),
                    nnodes=1,
                    deterministic=False,
                    facts=facts,
                    local_gpus=len(facts.devices),
                )
                problem = a2a_problem(backend, here) or runner_problem(runner, here)
                for phase in Phase:
                    layout = shared_layout(backend, runner, phase)
                    if layout is None and problem is None:
                        problem = f"the two share no layout in {phase.value}"
                    yield Cell(
                        a2a=backend.name,
                        runner=runner.name,
                        phase=phase.value,
                        weight_format=weight_format,
                        layout=layout.value if layout else None,
                        problem=problem,
                    )


def attention_problems(
    declared: Declarations, facts: MachineFacts, *, device: str, kernels: str
) -> Iterator[tuple[AttentionBackend, str | None]]:
    """Every attention backend and why it cannot compute on ``device`` for any model in bfloat16, or None."""
    here = Situation(
        device=device,
        kernels=kernels,
        dtype="bfloat16",
        weight_format="bfloat16",
        hidden_size=0,
        nnodes=1,
        deterministic=False,
        facts=facts,
    )
    for backend in declared.attention.values():
        problem = backend_problem(backend, here, None, None)
        yield backend, None if problem is None else problem.text


def _remark(backend: A2ABackend | AttentionBackend) -> str:
    return f" (never run: wants {backend.never_run})" if backend.never_run else ""


def _moving(backend: A2ABackend) -> str:
    return _remark(backend) or ("" if exchanges(backend) else " (moves no tokens)")


def summaries(declared: Declarations) -> list[tuple[str, str, str]]:
    """(kind, name, summary) of everything registered; what moves no tokens or never ran is said to."""
    rows = [("a2a", backend.name, backend.summary + _moving(backend)) for backend in declared.a2a.values()]
    rows += [("runner", runner.name, runner.summary) for runner in declared.runners.values()]
    attention = declared.attention.values()
    return rows + [("attention", each.name, each.summary + _remark(each)) for each in attention]
