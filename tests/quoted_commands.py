"""Commands that the documentation quotes, taken apart as the command line takes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from interlock.bench.arms import parse_arms
from interlock.cli import app
from interlock.errors import Refusal
from interlock.option_sources import gather
from interlock.option_text import options_of
from interlock.options import OPTIONS

LEFT_OUT = ("...", "&", "[options]", "[OPTIONS]", "[FILE...]")
"""What stands for more words, or is the shell's."""


def quoted_commands(page: str) -> Iterator[str]:
    """Command lines of ``interlock`` in code blocks and in code spans of a page of Markdown, without the
    first word."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    lines += re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    lines += [span.replace("\n", " ") for span in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose)]
    for line in lines:
        for part in line.split("&&"):
            found = re.search(r"(?:^|\s|bin/)interlock\s+([a-z-].*)$", part)
            if found and not re.search(r"\b(?:pip|import|from)\s", part):
                yield found[1]


def problem_of(command: str) -> str | None:
    """Why the command line would be refused before anything is planned; None where it would not, or where
    only a verb is named."""
    words = [word for word in shlex.split(command, comments=True) if word not in LEFT_OUT]
    for stop in ("|", ">"):
        words = words[: words.index(stop)] if stop in words else words
    verb: Any = typer.main.get_command(app)
    context = verb.make_context("interlock", [], resilient_parsing=True)
    while words and hasattr(verb, "get_command"):
        name = words.pop(0)
        verb = verb.get_command(context, name)
        if verb is None:
            return f"{name} is no verb"
    if not words:
        return None
    try:
        context = verb.make_context(verb.name, words)
        _read(context.params)
    except Refusal as refusal:
        return str(refusal)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return None


def _read(given: dict[str, Any]) -> None:
    """Read launch options, also those that are quoted in one string."""
    if "config" in given:
        gather({name: given[name] for name in OPTIONS if name in given}, config=None, environ={})
    if isinstance(given.get("arm"), list | tuple):
        parse_arms(given["arm"])
    for name in ("control", "candidate"):
        if given.get(name):
            options_of(given[name], f"--{name}")
