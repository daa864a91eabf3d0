"""The rank processes of this node: started together, watched, and ended together."""

from __future__ import annotations

import subprocess
import sys
import time

import msgspec

from interlock.engine.endpoints import Endpoints, RankSpec
from interlock.engine.supervisor import Exit
from interlock.plan.launch_plan import LaunchPlan

GRACE_SECONDS = 3.0


class RankProcesses:
    """Rank processes that end when this object is closed, or when this process dies.

    Args:
        ranks: global ranks to start on this node.
        rendezvous: host:port of the store that rank 0 hosts.
        endpoints: the front end's addresses, None on nodes without it.
    """

    def __init__(
        self, plan: LaunchPlan, ranks: range, *, rendezvous: str, endpoints: Endpoints | None
    ) -> None:
        self._processes = {
            rank: _start(
                RankSpec(
                    plan=plan,
                    rank=rank,
                    rendezvous=rendezvous,
                    endpoints=endpoints,
                    ranks_on_node=len(ranks),
                )
            )
            for rank in ranks
        }

    def exits(self) -> list[Exit]:
        """The processes that have ended so far."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return [Exit(rank, code) for rank, code in codes.items() if code is not None]

    def is_running(self) -> bool:
        return len(self.exits()) < len(self._processes)

    def process_ids(self) -> dict[int, int]:
        """Rank -> operating-system process id."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def wait(self, seconds: float) -> bool:
        """Wait for all processes to end; False when some still run after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.is_running()

    def close(self) -> None:
        """End every process: close its input, then kill what is left."""
        for process in self._processes.values():
            if process.stdin and not process.stdin.closed:
                process.stdin.close()
        if not self.wait(GRACE_SECONDS):
            for process in self._processes.values():
                process.kill()
        for process in self._processes.values():
            process.wait()


def _start(spec: RankSpec) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "interlock.engine.worker"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()
    return process
