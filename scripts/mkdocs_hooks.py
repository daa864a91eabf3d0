"""Lets the site read Markdown as GitHub does: a list or table may follow a paragraph without a blank line."""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^\s*(```|~~~)")
_BLOCK = re.compile(r"^(?:[-*] |\d+\. |\|)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the blank lines, outside of code."""
    lines: list[str] = []
    inside_code = False
    for line in markdown.splitlines():
        if _FENCE.match(line):
            inside_code = not inside_code
        before = lines[-1] if lines else ""
        starts = (
            _BLOCK.match(line) and before.strip() and not _BLOCK.match(before) and not before.startswith(" ")
        )
        if starts and not inside_code and not before.startswith("#"):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"
