"""What each verb of ``interlock bench`` does around its run: a note on the machine, a bar, the record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.console import console
from interlock.errors import Refusal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.evidence.schema import Evidence


def begin(plot: bool) -> str:
    """Refuse what would fail at the end; returns a note on how busy the machine is before the run."""
    if plot:
        from interlock.bench.plots import require_matplotlib

        require_matplotlib()
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    note = f"before the run the load average was {load:.1f} on {cores} CPUs"
    if load > cores / 2:
        note += ": the machine was busy, so look at the spread first"
        console(stderr=True, highlight=False).print(note, soft_wrap=True)
    return note


def integers(flag: str, text: str) -> tuple[int, ...]:
    """``"1,2,4"``, ascending and without repeats."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or values[0] < 1:
        raise Refusal(
            option=flag,
            given=text,
            rule="needs whole numbers from 1, with commas",
            alternatives=(f"{flag} 1,2,4",),
        )
    return tuple(values)


@contextmanager
def progress(units: int | None) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; the yielded function names each unit as it begins (or, in serve, ends)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=units)

        def tick(text: str) -> None:
            bar.update(task, description=text, advance=1)

        yield tick


def finish(
    table: RenderableType, evidence: Evidence, out: Path | None, name: str | None, plot: bool, load: str
) -> None:
    """Show the table, write the evidence and the plots beside it."""
    import msgspec

    from interlock.evidence.ledger import write_evidence
    from interlock.evidence.record import said_rehearsals

    screen = console(highlight=False)
    screen.print(table)
    for notice in said_rehearsals(evidence):
        screen.print(notice, soft_wrap=True)
    evidence = msgspec.structs.replace(evidence, notes=(*evidence.notes, load))
    path = write_evidence(evidence, out, name=name)
    paths = [path]
    if plot:
        from interlock.bench.plots import plot as draw

        paths += draw(evidence, path.with_suffix(""))
    screen.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True)
