"""Where a rank that makes no progress is: its Python stacks, from a signal handler that needs no GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

DUMP_SIGNAL: Final = signal.SIGUSR1
ANSWER_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 0.1
MOST_CHARS: Final = 20_000


def answer_with_stacks(descriptor: int) -> None:
    """In the rank: from now on ``DUMP_SIGNAL`` writes the stacks of all threads to ``descriptor``.

    Fatal errors (a segmentation fault, say) write them to standard error.
    """
    faulthandler.enable()
    if descriptor >= 0:
        faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True, chain=False)


class StackFile:
    """In the launcher: the file without a name into which one rank writes its stacks."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def descriptor(self) -> int:
        """Inherited by the rank under the same number."""
        return self._file.fileno()

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, start: int) -> str:
        """What was written from byte ``start`` on, without a broken end."""
        return os.pread(self.descriptor, MOST_CHARS, start).decode(errors="replace").strip()

    def close(self) -> None:
        self._file.close()


def dump(ranks: Mapping[int, tuple[int, StackFile]]) -> dict[int, str]:
    """Ask ranks (rank -> process id, file) where they are; waits until they have written, a second at most.

    A process that cannot answer, because it is stopped or gone, has an entry that says so.
    """
    begins = {rank: file.size for rank, (_, file) in ranks.items()}
    for process_id, _ in ranks.values():
        with suppress(ProcessLookupError):
            os.kill(process_id, DUMP_SIGNAL)
    deadline = time.monotonic() + ANSWER_SECONDS
    sizes: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(QUIET_SECONDS)
        before, sizes = sizes, [file.size for _, file in ranks.values()]
        if before == sizes and all(size > begin for size, begin in zip(sizes, begins.values(), strict=True)):
            break
    return {
        rank: file.read(begins[rank]) or "(no answer: the process is stopped, or stuck in the kernel)"
        for rank, (_, file) in ranks.items()
    }


def stacks_text(stacks: Mapping[int, str]) -> str:
    """The stacks under a heading for each rank."""
    return "\n".join(f"where rank {rank} was:\n{text}" for rank, text in sorted(stacks.items()))
