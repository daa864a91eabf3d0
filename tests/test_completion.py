"""Shell completion, through the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from interlock.cli import run

ROOT = Path(__file__).resolve().parents[1]


def suggestions(words: str, *, shell: str = "bash") -> list[str]:
    """What the program answers to a completion script for a line that ends in ``words``."""
    env = {**os.environ, "_INTERLOCK_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(ROOT / "src")}
    env |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "interlock"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("interlock comple", ["completion"]),
        ("interlock serve --moe-a2a-b", ["--moe-a2a-backend"]),
        ("interlock serve --moe-a2a-backend col", ["collective"]),
        ("interlock plan tiny", ["tiny-random"]),
        ("interlock serve demo --log-format ", ["text", "json"]),
    ],
)
def test_verbs_options_and_choices(line: str, found: list[str]) -> None:
    assert suggestions(line) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_in_its_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_INTERLOCK_COMPLETE=complete_{shell}" in script
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", "/dev/stdin"], input=script, text=True, check=True)


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "tcsh"]) == 2
    assert "interlock completion bash" in capsys.readouterr().err
