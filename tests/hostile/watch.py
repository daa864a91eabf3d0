"""What a run looks at: memory of every process, open files, and whether pages and slots are free."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import psutil

from tests.e2e.processes import BASE, READY, SERVE, Process, Served

KEPT_LINES = 4000
PAGES = ("interlock:kv_cache_usage_perc", "interlock:kv_window_cache_usage_perc")


@dataclass
class Memory:
    """Resident bytes of each process of a server over time: front end, ranks, and compilers of grammars.

    ``warm_up``: the first share of the samples, in which caches fill up to their limits.
    """

    served: Served
    warm_up: float = 0.2
    samples: list[dict[str, int]] = field(default_factory=list)

    def processes(self) -> dict[str, psutil.Process]:
        front = psutil.Process(self.served.process.popen.pid)
        found = {"front end": front}
        found |= {f"rank {index}": rank for index, rank in enumerate(self.served.process.ranks())}
        others = [child for child in front.children(recursive=True) if child not in found.values()]
        return found | {f"grammar compiler {index}": child for index, child in enumerate(others)}

    def note(self) -> None:
        """Take a sample; a compiler that is just being replaced is left out."""
        sample = {}
        for name, process in self.processes().items():
            with suppress(psutil.NoSuchProcess):
                sample[name] = process.memory_info().rss
        self.samples.append(sample)

    def open_files(self) -> int:
        """Of front end and ranks."""
        return sum(process.num_fds() for name, process in self.processes().items() if _serves(name))

    def serving(self) -> list[int]:
        """Resident bytes of front end and ranks together, over time."""
        return [sum(size for name, size in sample.items() if _serves(name)) for sample in self.samples]

    def growth(self) -> float:
        """Of front end and ranks together, after the warm-up."""
        return self._growth(self.serving())

    def growth_by_process(self) -> dict[str, float]:
        """Of each process that was there all the time."""
        after = self.samples[int(len(self.samples) * self.warm_up) :]
        names = [name for name in after[0] if all(name in sample for sample in after)]
        return {
            name: round(self._growth([sample.get(name, 0) for sample in self.samples]), 4) for name in names
        }

    def mib(self, points: int = 12) -> dict[str, list[float]]:
        """A few of the samples of each process, in MiB."""
        names = dict.fromkeys(name for sample in self.samples for name in sample)
        some = self.samples[:: max(1, len(self.samples) // points)]
        return {name: [round(sample.get(name, 0) / 2**20, 1) for sample in some] for name in names}

    def _growth(self, values: Sequence[int]) -> float:
        """Median of the last tenth over the median of the tenth after the warm-up, less 1."""
        start = int(len(values) * self.warm_up)
        tenth = max(1, (len(values) - start) // 10)
        return statistics.median(values[-tenth:]) / statistics.median(values[start : start + tenth]) - 1


def _serves(name: str) -> bool:
    return not name.startswith("grammar")


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
