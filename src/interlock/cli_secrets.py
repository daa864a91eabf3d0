"""Taking the API key out of what other users of the machine can see of this process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from interlock.option_kinds import Secret

_STAT = Path("/proc/self/stat")
_ARG_START, _ARG_END = 48, 49


def wipe(key: Secret) -> bool:
    """Overwrite ``key`` in ``sys.argv`` and in the argument memory that ``/proc/PID/cmdline`` shows.

    Returns:
        True when the process list no longer shows the key (also when it never did).
    """
    text = key.reveal()
    sys.argv[:] = [argument.replace(text, "***") for argument in sys.argv]
    shown = _command_line()
    secret = text.encode()
    if shown is None:
        return False
    if secret not in shown:
        return True
    span = _argument_memory()
    if span is None:
        return False
    start, end = span
    memory = ctypes.string_at(start, end - start)
    position = memory.find(secret)
    while position >= 0:
        ctypes.memset(start + position, ord("*"), len(secret))
        position = memory.find(secret, position + len(secret))
    return secret not in (_command_line() or b"")


def _command_line() -> bytes | None:
    try:
        return Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return None


def _argument_memory() -> tuple[int, int] | None:
    """First and past-the-last address of this process's arguments (proc(5), fields 48 and 49)."""
    try:
        after_name = _STAT.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = (int(after_name[field - 3]) for field in (_ARG_START, _ARG_END))
    except (OSError, ValueError, IndexError):
        return None
    return (start, end) if 0 < start < end else None
