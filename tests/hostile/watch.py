"""What a run looks at: memory of every process, open files, and whether pages and slots are free."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil

from tests.e2e.processes import BASE, READY, SERVE, Process, Served

KEPT_LINES = 4000
PAGES = ("interlock:kv_cache_usage_perc", "interlock:kv_window_cache_usage_perc")


@dataclass
class Memory:
    """Resident bytes of the server and its ranks over time."""

    served: Served
    samples: list[tuple[float, int]] = field(default_factory=list)

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.served.process.popen.pid), *self.served.process.ranks()]

    def note(self) -> int:
        total = sum(process.memory_info().rss for process in self.processes())
        self.samples.append((time.monotonic(), total))
        return total

    def open_files(self) -> int:
        return sum(process.num_fds() for process in self.processes())

    def growth(self, warm_up: float = 0.2) -> float:
        """Median of the last tenth over the median of the tenth after the warm-up, less 1."""
        values = [value for _, value in self.samples]
        start = int(len(values) * warm_up)
        tenth = max(1, (len(values) - start) // 10)
        return statistics.median(values[-tenth:]) / statistics.median(values[start : start + tenth]) - 1


def free(served: Served) -> bool:
    """No request is anywhere, and no page is held by one."""
    seen = served.metrics()
    names = (
        "interlock:requests_live",
        "interlock:num_requests_running",
        "interlock:num_requests_waiting",
        *PAGES,
    )
    return all(seen[name] == 0 for name in names)


def seconds_until_free(served: Served, limit: float = 60.0) -> float:
    """How long from now until everything is free; ``limit`` when it takes longer."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit:
        if free(served):
            return time.monotonic() - begun
        time.sleep(0.02)
    return limit


def is_alive(served: Served) -> bool:
    try:
        return served.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def finish(name: str, figures: Mapping[str, object], missed: Sequence[str]) -> int:
    """Print what was measured; the exit code."""
    print(json.dumps({"run": name, **figures, "missed": list(missed)}, indent=1))
    return 1 if missed else 0


class BriefProcess(Process):
    """Keeps the end of a long log only."""

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.append(line.rstrip("\n"))
            if len(self.lines) > KEPT_LINES:
                del self.lines[: KEPT_LINES // 2]


@contextmanager
def started(flags: Sequence[str]) -> Iterator[Served]:
    """A server for a run: ``tiny-random`` with ``flags``, ended as a user ends it, which must succeed."""
    process = BriefProcess([*SERVE, *BASE, "--port", "0", *flags])
    try:
        yield Served(process, process.wait_for(READY)[1])
        if process.popen.poll() is None:
            process.signal(signal.SIGTERM)
            assert process.wait() == 0, process.text
    finally:
        process.end()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("flags", nargs="*", help="options of the server, behind --")
    return made
