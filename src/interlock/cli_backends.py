"""``interlock backends``: the table of a2a backend x runner x phase x weight format on a machine."""

from __future__ import annotations

from itertools import groupby

from interlock.console import console
from interlock.errors import Refusal
from interlock.plan.disaggregation import transfer_problem
from interlock.plan.facts import MachineFacts
from interlock.plan.join import Declarations
from interlock.plan.kernel_choice import default_kernels
from interlock.plan.matrix import Cell, attention_problems, matrix, summaries


def show(facts: MachineFacts, *, device: str | None, as_json: bool) -> int:
    """Print the table; returns the exit code."""
    device = device or ("cuda" if facts.devices else "cpu")
    if device not in ("cpu", "cuda"):
        raise Refusal(option="--device", given=device, rule="is neither cpu nor cuda")
    declared = Declarations.registered()
    kernels = default_kernels(facts, device, 1)
    cells = list(matrix(declared, facts, device=device, kernels=kernels))
    if as_json:
        import msgspec

        transfers = [
            {
                "backend": name,
                "summary": each.summary,
                "limits": each.limits,
                "problem": transfer_problem(each, facts, device),
            }
            for name, each in declared.transfers.items()
        ]
        attention = [
            {"backend": each.name, "summary": each.summary, "never_run": each.never_run, "problem": problem}
            for each, problem in attention_problems(declared, facts, device=device, kernels=kernels)
        ]
        content = {
            "device": device,
            "combinations": cells,
            "attention": attention,
            "transfers": transfers,
            "broken": broken(),
        }
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
        return 0
    _print(declared, cells, device, facts, kernels)
    return 0


def broken() -> dict[str, str]:
    """Plugins that are registered but cannot be used, with the reason."""
    from interlock.kv.transfer.registry import transfer_backends
    from interlock.moe.a2a.registry import a2a_backends
    from interlock.moe.experts.registry import expert_runners
    from interlock.nn.attention_backends.registry import attention_backends

    catalogues = (a2a_backends(), expert_runners(), attention_backends(), transfer_backends())
    return {name: reason for each in catalogues for name, reason in each.broken.items()}


def _print(declared: Declarations, cells: list[Cell], device: str, facts: MachineFacts, kernels: str) -> None:
    from rich.table import Table

    names = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in summaries(declared):
        names.add_row(*row)
    table = Table(title=f"On {device}", title_justify="left", box=None, header_style="bold")
    for column in ("a2a", "runner", "weights", "prefill", "decode"):
        table.add_column(column, overflow="fold")
    for (a2a, runner, weights), group in groupby(cells, lambda c: (c.a2a, c.runner, c.weight_format)):
        table.add_row(a2a, runner, weights, *(_verdict(cell) for cell in group))
    screen = console()
    screen.print(names)
    screen.print(table)
    computes = Table(title="Attention over the cache", title_justify="left", box=None)
    for column in ("attention", ""):
        computes.add_column(column, overflow="fold")
    for backend, problem in attention_problems(declared, facts, device=device, kernels=kernels):
        computes.add_row(backend.name, "ready" if problem is None else f"no: {problem}")
    screen.print(computes)
    moves = Table(title="Between prefill and decode servers", title_justify="left", box=None)
    for column in ("transfer", "", "pages"):
        moves.add_column(column, overflow="fold")
    for name, transfer in declared.transfers.items():
        problem = transfer_problem(transfer, facts, device)
        text = "; ".join(filter(None, (transfer.summary, transfer.limits)))
        moves.add_row(name, "ready" if problem is None else f"no: {problem}", text)
    screen.print(moves)
    for name, reason in broken().items():
        screen.print(f"broken plugin {name}: {reason}", style="red", markup=False)


def _verdict(cell: Cell) -> str:
    if cell.problem is None:
        return f"ready ({cell.layout})"
    return f"no: {cell.problem}"
