"""A rank that hangs tells where, whatever holds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from interlock.engine.stacks import StackFile, dump, stacks_text

BUSY = """
def deep_in_python():
    while True: pass
"""
STUCK_WITH_THE_GIL = """
def deep_in_c():
    import ctypes
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""
WAITING = """
import threading
def waits_for_a_peer():
    threading.Event().wait()
"""


@contextmanager
def hanging(code: str) -> Iterator[tuple[int, StackFile]]:
    """A process that runs the last function of ``code`` and never ends."""
    name = code.rsplit("def ", 1)[1].split("(")[0]
    file = StackFile()
    program = (
        "import sys; from interlock.engine.stacks import answer_with_stacks\n"
        f"answer_with_stacks({file.descriptor})\n{code}\nprint('hangs', flush=True)\n{name}()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, pass_fds=(file.descriptor,)
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid, file
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        file.close()


def until_there(rank: tuple[int, StackFile], name: str) -> None:
    """Wait until the process is in its last function."""
    deadline = time.monotonic() + 20
    while name not in dump({0: rank})[0]:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("code", [BUSY, STUCK_WITH_THE_GIL, WAITING], ids=["python", "c", "thread"])
def test_the_stack_of_a_hanging_process(code: str) -> None:
    """J01: also of one that holds the GIL inside a C call, where no Python thread could tell."""
    name = code.rsplit("def ", 1)[1].split("(")[0]
    with hanging(code) as rank:
        until_there(rank, name)
        again = dump({0: rank})[0]
        assert again.count(f" in {name}") == 1
        assert stacks_text({0: again}).startswith("where rank 0 was:\n")


def test_a_stopped_process_cannot_tell_and_holds_nobody_up() -> None:
    with hanging(BUSY) as stopped, hanging(WAITING) as other:
        until_there(other, "waits_for_a_peer")
        os.kill(stopped[0], signal.SIGSTOP)
        found = dump({3: stopped, 5: other})
        assert found[3].startswith("(no answer")
        assert "waits_for_a_peer" in found[5]
