"""Imports go downwards: the map of docs/architecture.md, held to the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
ROOMS = (
    {"errors", "plugins", "heap", "logs", "listening", "console"},
    {"options", "option_kinds", "option_sources", "option_text"},
    {"kernels"},
    {"checkpoint", "parallel", "step"},
    {"kv"},
    {"nn"},
    {"moe"},
    {"models", "reference", "tokenizer"},
    {"structured"},
    {"engine", "evidence"},
    {"server", "router", "demo", "launch", "launcher"},
    {"verify", "bench", "llm", "serve"},
)  # fmt: skip
"""From the bottom up. What is not named here (the command line, generators of documentation) is on top."""
LIGHT = {"interlock.moe.terms", "interlock.parallel.sharding"}
"""Words and arithmetic without torch, which rooms below may read. So may everybody read ``plan``."""


def room(module: str) -> str:
    """The folder or file of the package that a module is in, "" for modules of others."""
    first, *rest = module.split(".")
    return (*rest, first)[0] if first == "interlock" else ""


def level(name: str) -> int:
    return next((index for index, rooms in enumerate(ROOMS) if name in rooms), len(ROOMS))


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that the file imports when it is loaded."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and room(node.module):
            for alias in node.names:
                below = SOURCE.joinpath(*node.module.split("."), f"{alias.name}.py")
                yield f"{node.module}.{alias.name}" if below.exists() else node.module


def files() -> list[Path]:
    return sorted((SOURCE / "interlock").rglob("*.py"))


def test_no_room_imports_one_above_it() -> None:
    upwards = []
    for path in files():
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if room(module) == "plan":
            continue
        for other in imports(path):
            if room(other) != "plan" and other not in LIGHT and level(room(other)) > level(room(module)):
                upwards.append(f"{module} -> {other}")
    assert upwards == []


def test_every_room_is_on_the_map() -> None:
    """A folder that is new has a place among the others, or imports would not be held to one."""
    folders = {path.name for path in (SOURCE / "interlock").iterdir() if (path / "__init__.py").exists()}
    assert folders - {"plan"} == {name for rooms in ROOMS for name in rooms} & folders


@pytest.mark.parametrize("module", sorted(LIGHT | {"interlock.launch", "interlock.options"}))
def test_what_the_plan_reads_is_light(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_attention_backends_are_named_nowhere_but_in_their_folders() -> None:
    folder = "interlock.nn.attention_backends"
    named = [
        f"{path.relative_to(SOURCE)}: {other}"
        for path in files()
        for other in imports(path)
        if other.startswith(f"{folder}.")
        and other.split(".")[3] not in ("base", "registry")
        and "attention_backends" not in path.parts
    ]
    assert named == []


def test_backends_are_named_nowhere_but_in_their_folders() -> None:
    """Models, layers and the engine import no backend and no runner: those are built by what they declare."""
    declared = ("backend", "base", "checked", "choice", "contract", "registry", "rows")
    named = [
        f"{path.relative_to(SOURCE)}: {other}"
        for path in files()
        for other in imports(path)
        if other.startswith(("interlock.moe.a2a.", "interlock.moe.experts."))
        and other.split(".")[3] not in declared
        and (room(".".join(path.relative_to(SOURCE).parts)) != "moe" or path.parent.name == "moe")
    ]
    assert named == []
