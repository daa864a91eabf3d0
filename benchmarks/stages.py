"""Stages of a session on a GPU machine: commands with a limit each, one after the other.

A stage that fails or takes too long does not stop the others. What it prints is kept in
``<out>/<stage>.txt``; here only its end is shown.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHOWN = 3300
"""Characters of a stage that are shown."""
LEAST_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Stage:
    """A command, and the seconds it may take."""

    name: str
    limit: int
    command: list[str]


def add_arguments(parser: argparse.ArgumentParser, default: Sequence[str] | None = None) -> None:
    """``--out``, ``--stages`` (those of ``default``; None for all) and ``--limit``."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", default=default)
    parser.add_argument("--limit", type=int, default=540, help="seconds for all of them")


def chosen(parser: argparse.ArgumentParser, asked: Sequence[str] | None, known: list[Stage]) -> list[Stage]:
    """The stages called ``asked``, all where None; an unknown one ends the program with the known ones."""
    names = [stage.name for stage in known]
    unknown = [name for name in asked or () if name not in names]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; stages: {', '.join(names)}")
    return [stage for stage in known if asked is None or stage.name in asked]


def run_stages(stages: Sequence[Stage], out: Path, limit: int) -> None:
    """Run them within ``limit`` seconds in all."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit
    for stage in stages:
        left = int(end - time.monotonic())
        if left < LEAST_SECONDS:
            print(f"== {stage.name}: no time left", flush=True)
            continue
        _run(stage, out, min(left, stage.limit))


def _run(stage: Stage, out: Path, limit: int) -> None:
    log = out / f"{stage.name}.txt"
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            code: int | str = subprocess.run(
                stage.command, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
    text = log.read_text(encoding="utf-8", errors="replace")
    print(f"== {stage.name}: {code} after {time.monotonic() - start:.0f} s", flush=True)
    print(text[-SHOWN:].strip(), flush=True)
