"""The build cache of the native library, and kernel sets by name."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from interlock.errors import InterlockError
from interlock.kernels import availability
from interlock.kernels.cpu import build
from interlock.kernels.registry import get_kernels

FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "${FAKE_VERSION:-fake 1}"; exit 0; fi
echo compiled >> "$FAKE_LOG"
sleep 0.2
for last; do :; done
echo library > "$last"
"""


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin" / "c++"
    path.parent.mkdir()
    path.write_text(FAKE_COMPILER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return path


def compilations(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_second_build_comes_from_the_cache(fake_compiler: Path, tmp_path: Path) -> None:
    first = build.build_library(tmp_path / "cache", compiler=str(fake_compiler))
    assert build.build_library(tmp_path / "cache", compiler=str(fake_compiler)) == first
    assert first.read_text() == "library\n"
    assert compilations(tmp_path) == 1
    assert {path.name for path in first.parent.iterdir()} == {first.name, "lock"}


def test_key_covers_compiler_flags_cpu_and_sources(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")

    def library() -> Path:
        return build.build_library(tmp_path / "cache", compiler=str(fake_compiler), sources=sources)

    libraries = [library()]
    monkeypatch.setenv("FAKE_VERSION", "fake 2")
    libraries.append(library())
    monkeypatch.setattr(build, "compiler_flags", lambda: ("-O2",))
    libraries.append(library())
    monkeypatch.setattr(build, "cpu_features", lambda: "another")
    libraries.append(library())
    (sources / "a.cpp").write_text("int b;")
    libraries.append(library())
    assert len(set(libraries)) == 5


def test_processes_that_race_compile_once(fake_compiler: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from interlock.kernels.cpu.build import build_library;"
        "print(build_library(pathlib.Path(sys.argv[1]), compiler=sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(fake_compiler)]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "library\n"
    assert compilations(tmp_path) == 1


def test_missing_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.native_cpu_unavailable() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = availability.native_cpu_unavailable()
    assert reason is not None
    assert "apt-get install g++" in reason
    with pytest.raises(InterlockError, match=r"no C\+\+ compiler .* is on PATH"):
        build.build_library(tmp_path / "cache")


def test_compiler_errors_are_shown(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "vector.hpp:1: no such type" >&2\nexit 3\n'
    )
    broken.chmod(0o755)
    with pytest.raises(InterlockError, match=r"exit code 3(.|\n)*no such type(.|\n)*kernels \"torch\""):
        build.build_library(tmp_path / "cache", compiler=str(broken))
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_unwritable_cache_is_explained(fake_compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InterlockError, match="XDG_CACHE_HOME"):
        build.build_library(tmp_path / "file" / "cache", compiler=str(fake_compiler))


def test_default_cache_follows_xdg(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    library = build.build_library(compiler=str(fake_compiler))
    assert library.is_relative_to(tmp_path / "xdg" / "interlock" / "kernels")


def test_registry() -> None:
    assert get_kernels("cpu", threads=1).row_invariant
    assert get_kernels("torch", threads=1).name == "torch"
    with pytest.raises(InterlockError, match='"cuda" are unknown; known kernel sets: cpu, torch'):
        get_kernels("cuda", threads=1)
    with pytest.raises(ValueError, match=r"^threads:"):
        get_kernels("cpu", threads=0)


def test_availability_does_not_import_torch() -> None:
    code = (
        "import sys; from interlock.kernels.availability import native_cpu_unavailable;"
        "native_cpu_unavailable(); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert result.stdout.strip() == "False"
