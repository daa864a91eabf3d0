"""Compile native code for this machine once, and keep the library in the user's cache directory.

The cache key covers sources, compiler version, flags and the CPU's features. Several processes may build at
once: a lock lets one compile while the others wait, and the finished library appears by an atomic rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from interlock.errors import InterlockError
from interlock.kernels.availability import find_compiler, native_cpu_unavailable

SOURCES = Path(__file__).parent / "native"
LIBRARY_NAME = "interlock_kernels.so"


def compiler_flags() -> tuple[str, ...]:
    """Flags of the build. Fused multiply-add must be used everywhere or nowhere, so it is asked for."""
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    return (
        "-O3",
        "-mcpu=native" if is_arm else "-march=native",
        "-std=c++17",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-shared",
        "-fPIC",
        "-pthread",
    )


def cpu_features() -> str:
    """What ``-march=native`` depends on: the first CPU's model and feature lines, or the machine's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("flags", "features", "model", "model name", "cpu family", "cpu part", "cpu implementer")
    return "\n".join(line for line in lines if line.split(":")[0].strip().lower() in names)


def build_library(
    cache: Path | None = None,
    *,
    compiler: str | None = None,
    sources: Path = SOURCES,
    name: str = LIBRARY_NAME,
) -> Path:
    """Path of the compiled library, compiling it first when the cache does not hold it.

    Args:
        cache: directory of libraries; default ``<user cache>/interlock/kernels``.
        compiler: path of a C++ compiler; default the first that ``find_compiler`` finds.
        sources: folder of the library's C++ files.
        name: file name of the library.

    Raises:
        InterlockError: there is no compiler, or it failed; the message carries what it said.
    """
    compiler = compiler or find_compiler()
    reason = native_cpu_unavailable()
    if compiler is None or reason is not None:
        raise InterlockError(reason or "no C++ compiler was found")
    files = sorted(sources.glob("*.[ch]pp"))
    cache = cache or platformdirs.user_cache_path("interlock") / "kernels"
    folder = cache / _key(compiler, files)
    library = folder / name
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                _compile(compiler, [path for path in files if path.suffix == ".cpp"], library)
    except OSError as error:
        raise InterlockError(
            f"native code cannot be stored in {folder}: {error}; set XDG_CACHE_HOME to a writable directory"
        ) from error
    return library


def _key(compiler: str, sources: list[Path]) -> str:
    version = _run([compiler, "--version"]).stdout
    digest = hashlib.sha256()
    for part in (version, " ".join(compiler_flags()), cpu_features()):
        digest.update(part.encode() + b"\0")
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *compiler_flags(), *map(str, sources), "-o", str(built)]
        result = _run(command)
        if result.returncode != 0:
            raise InterlockError(
                f"compiling {library.name} failed (exit code {result.returncode}):\n{' '.join(command)}\n"
                f"{result.stderr.strip()[-4000:]}\n"
                'update the compiler (GCC >= 11 or Clang >= 14), or use kernels "torch"'
            )
        os.replace(built, library)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise InterlockError(f"the C++ compiler {command[0]} cannot be run: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
