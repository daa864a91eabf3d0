"""Folders that are complete or absent, and one writer at a time."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from interlock.errors import InterlockError


@contextmanager
def one_writer(folder: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock ``name`` of a cache folder; it is released when the process ends, however it ends.

    ``say`` is told if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is preparing {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def complete_or_absent(final: Path) -> Iterator[Path]:
    """An empty folder to fill, renamed to ``final`` when the block succeeds and removed when it fails.

    What a killed process left behind is removed first. The caller holds the lock of this cache.
    """
    partial = final.with_name(f".partial-{final.name}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse early when a disk has too little room.

    Raises:
        InterlockError: fewer than ``needed`` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InterlockError(
            f"{what} needs {needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free; "
            "make room, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
