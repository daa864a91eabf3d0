"""A progress bar for each stage of preparing a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]


class Stages(Protocol):
    """Where stages report to."""

    def start(self, name: str, total: int | None) -> Advance:
        """Begin a stage of ``total`` units (None: unknown); the result is told what was done."""
        ...

    def say(self, text: str) -> None:
        """A line of text."""
        ...


class _Silent:
    def start(self, name: str, total: int | None) -> Advance:
        return lambda done: None

    def say(self, text: str) -> None:
        pass


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, name: str, total: int | None) -> Advance:
        task = self._progress.add_task(name, total=total)
        return lambda done: self._progress.advance(task, done)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextmanager
def show_stages(visible: bool) -> Iterator[Stages]:
    """Bars on standard error, or nothing."""
    if not visible:
        yield _Silent()
        return
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bars(progress)
