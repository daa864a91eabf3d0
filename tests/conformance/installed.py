"""Packages with entry points, for tests: installed by pip, or as the metadata that pip would leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pip_install(package: Path, target: Path) -> Path:
    """``pip install`` a folder into ``target``, without network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", "--target", str(target), str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def fake_install(target: Path, name: str, group: str, entries: Mapping[str, str]) -> Path:
    """Metadata of a distribution ``name`` with ``entries`` in entry-point group ``group``."""
    info = target / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return target


def run_python(code: str, *paths: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds packages in ``paths``."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )
