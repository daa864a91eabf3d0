"""The documentation says what the code says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from interlock.backend_docs import backends_markdown
from interlock.moe.a2a.registry import a2a_backends
from interlock.moe.experts.registry import expert_runners
from tests.quoted_commands import problem_of, quoted_commands

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_the_table_of_backends_is_current() -> None:
    text = (DOCS / "backends.md").read_text(encoding="utf-8")
    assert text == backends_markdown(), "python -m interlock.backend_docs > docs/backends.md"
    for name in ("none", "collective", "shared_memory"):
        assert f"| `{name}` |" in text
        assert name in a2a_backends().entries
    assert "| `cpu` |" in text
    assert "cpu" in expert_runners().entries


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    """Headings quote messages; each quoted piece is in the source, apart from what is filled in."""
    source = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "src" / "interlock").rglob("*.py"))
    )
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        text
        for line in re.findall(r"^### (.+)$", page, re.MULTILINE)
        for text in re.findall(r"`(.+?)`", line)
    ]
    assert len(quoted) > 20
    for text in quoted:
        for piece in text.split("%s"):
            assert piece.strip() in source, piece


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        assert not isinstance(values, int | float)
        return [page for value in values for page in pages(value)]  # type: ignore[union-attr]

    listed = pages(site["nav"])
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_links_between_pages_lead_somewhere() -> None:
    for path in [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_quoted_command_is_one() -> None:
    commands = [
        (path.name, command)
        for path in [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for command in quoted_commands(path.read_text(encoding="utf-8"))
    ]
    assert len(commands) > 60
    assert [(*each, problem) for each in commands if (problem := problem_of(each[1]))] == []


@pytest.mark.parametrize(
    "command",
    ["serve demo --tp 2", "plan demo --tp-size x", "start demo", 'bench decode x --arm "a=--x 1"'],
)
def test_a_wrong_command_would_be_noticed(command: str) -> None:
    assert problem_of(command)


def test_every_quoted_file_exists() -> None:
    """Programs that are run and folders that are pointed at, from the root of the repository."""
    for path in [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        text = path.read_text(encoding="utf-8")
        named = re.findall(
            r"(?:`|python |pytest )((?:benchmarks|scripts|tests|examples|packaging|evidence)/[\w./-]*\w)",
            text,
        )
        named += [f"{each.replace('.', '/')}.py" for each in re.findall(r"python -m (tests\.[\w.]+\w)", text)]
        missing = [each for each in named if not any(ROOT.glob(f"{each}*"))]
        assert not missing, f"{path.name}: {missing}"


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("mkdocs")
    if not program.exists() and shutil.which("mkdocs") is None:
        pytest.skip("mkdocs is not installed (pip install '.[docs]')")
    command = [str(program) if program.exists() else "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
