"""``docs/backends.md`` from the declarations: ``python -m interlock.backend_docs > docs/backends.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.experts.base import ExpertRunner
from interlock.moe.experts.registry import expert_runners
from interlock.moe.terms import Layout, Phase
from interlock.nn.attention_backends.base import AttentionBackend
from interlock.nn.attention_backends.registry import attention_backends
from interlock.plan.join import pair_problem, shared_layout

T = TypeVar("T")

HEADER = """\
# Backends and runners

Generated from the declarations by `python -m interlock.backend_docs > docs/backends.md`; a test fails when
the two differ. What works on your machine, or exactly why not, is shown by `interlock backends`; what was
proven correct by `interlock evidence list`.

An *a2a backend* (`--moe-a2a-backend`) moves tokens to the ranks that hold their experts and brings the
results home. A *runner* (`--moe-runner-backend`) computes the experts. They meet in a
[layout](concepts.md#layouts) of rows. An [*attention backend*](attention.md) (`--attention-backend`) computes
attention over the cached keys and values.
"""


def backends_markdown() -> str:
    """The whole page."""
    a2a = _own(a2a_backends().entries.values(), lambda backend: backend.dispatcher)
    runners = _own(expert_runners().entries.values(), lambda runner: runner.runner)
    attention = _own(attention_backends().entries.values(), lambda backend: backend.backend)
    tables = (_a2a_table(a2a), _runner_table(runners), _attention_table(attention), _pair_table(a2a, runners))
    return HEADER + "".join(tables)


def _own(entries: Iterable[T], symbol: Callable[[T], str]) -> list[T]:
    """Those of this package; third parties document theirs."""
    return [entry for entry in entries if symbol(entry).startswith("interlock.")]


def _a2a_table(backends: Iterable[A2ABackend]) -> str:
    rows = [
        (
            f"`{backend.name}`",
            backend.summary,
            _list(backend.devices),
            _list(backend.links),
            _list(backend.layouts.get(Phase.PREFILL, ())),
            _list(backend.layouts.get(Phase.DECODE, ())),
            _list(backend.row_dtypes),
            f"{backend.min_ranks} to {backend.max_ranks or 'any'}",
            _list([*backend.packages, *backend.distributions[:1]]),
            f"no: wants {backend.never_run}" if backend.never_run else "yes",
        )
        for backend in backends
    ]
    head = ("backend", "how", "devices", "links", "prefill", "decode", "rows", "ranks", "needs", "ever run")
    return "\n## A2A backends\n" + _table(head, rows)


def _runner_table(runners: Iterable[ExpertRunner]) -> str:
    rows = [
        (
            f"`{runner.name}`",
            runner.summary,
            _list(runner.devices),
            _list(runner.weight_formats) + (", dequantised" if runner.dequantises else ""),
            _list(runner.activation_dtypes),
            "yes" if runner.row_invariant else "no",
            _list(runner.packages),
        )
        for runner in runners
    ]
    head = ("runner", "how", "devices", "weights", "activations", "row invariant", "needs")
    return "\n## Runners\n" + _table(head, rows)


def _attention_table(backends: Iterable[AttentionBackend]) -> str:
    rows = [
        (
            f"`{backend.name}`",
            backend.summary,
            _list(backend.devices) + _capabilities(backend),
            _list(backend.dtypes),
            _list(backend.kv_dtypes) if backend.kv_dtypes else "any",
            "; ".join(map(str, backend.head_widths)) or "any",
            _list(
                what
                for what, has in (
                    ("windows", backend.windows),
                    ("sinks", backend.sinks),
                    ("CUDA graphs", backend.capturable),
                    ("row invariant", backend.row_invariant),
                )
                if has
            ),
            _list(backend.packages),
            f"no: wants {backend.never_run}" if backend.never_run else "yes",
        )
        for backend in backends
    ]
    head = ("backend", "how", "devices", "queries", "cache", "head widths", "has", "needs", "ever run")
    return "\n## Attention backends\n" + _table(head, rows)


def _capabilities(backend: AttentionBackend) -> str:
    """Compute capabilities that it is limited to, in brackets."""
    low, high = backend.min_capability, backend.max_capability
    if high is None:
        return f" ({low[0]}.{low[1]} or more)" if low > (0, 0) else ""
    return f" ({low[0]}.{low[1]} to {high[0]}.{high[1]})" if low != high else f" ({low[0]}.{low[1]})"


def _pair_table(backends: list[A2ABackend], runners: list[ExpertRunner]) -> str:
    rows = []
    for backend in backends:
        for runner in runners:
            if not backend.devices & runner.devices or pair_problem(backend, runner) is not None:
                continue
            prefill, decode = (shared_layout(backend, runner, phase) for phase in Phase)
            devices = _list(backend.devices & runner.devices)
            rows.append((f"`{backend.name}`", f"`{runner.name}`", devices, _layout(prefill), _layout(decode)))
    head = ("a2a", "runner", "devices", "prefill layout", "decode layout")
    return "\n## What goes together\n" + _table(head, rows)


def _layout(layout: Layout | None) -> str:
    return layout.value if layout else "-"


def _list(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values))) or "-"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    print(backends_markdown(), end="")
