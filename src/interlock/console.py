"""Where tables are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 180
"""Columns where there is no terminal: a table in a file or a pipe is not broken for one."""


def console(*, stderr: bool = False, highlight: bool = True) -> Console:
    """The terminal in its own width, or a stream of lines of ``WIDTH`` columns."""
    from rich.console import Console

    terminal = Console(stderr=stderr, highlight=highlight)
    return terminal if terminal.is_terminal else Console(width=WIDTH, stderr=stderr, highlight=highlight)
