"""The rank processes of this node: started together, watched, and ended together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import msgspec

from interlock.engine.endpoints import Endpoints, Place, RankSpec
from interlock.engine.stacks import StackFile, dump
from interlock.engine.supervisor import Exit
from interlock.kv.transfer.registry import library_environment
from interlock.parallel.store_address import StoreAddress
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.rehearsal import rank_environment

GRACE_SECONDS = 3.0


class RankProcesses:
    """Rank processes that end when this object is closed, or when this process dies.

    Args:
        place: the ranks to start.
        store: where all ranks find each other.
        endpoints: the front end's addresses, None on nodes without it.
        reports: address at which this process hears of failures, on nodes without the front end.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        place: Place,
        *,
        store: StoreAddress,
        endpoints: Endpoints | None = None,
        reports: str = "",
    ) -> None:
        self._stack_files = {rank: StackFile() for rank in place.ranks}
        self._processes = {
            rank: _start(
                RankSpec(
                    plan=plan,
                    rank=rank,
                    store=store,
                    endpoints=endpoints,
                    reports=reports,
                    ranks_on_node=place.ranks_on_node,
                    stacks=self._stack_files[rank].descriptor,
                    begun=time.monotonic(),
                )
            )
            for rank in place.ranks
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

    def stacks(self) -> dict[int, str]:
        """Rank -> Python stacks of all its threads, of the ranks that still run. Takes up to a second."""
        running = {
            rank: (process.pid, self._stack_files[rank])
            for rank, process in self._processes.items()
            if process.poll() is None
        }
        return dump(running)

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
                with suppress(BrokenPipeError):
                    process.stdin.close()
        if not self.wait(GRACE_SECONDS):
            for process in self._processes.values():
                process.kill()
        for process in self._processes.values():
            process.wait()
        for file in self._stack_files.values():
            file.close()


def _start(spec: RankSpec) -> subprocess.Popen[bytes]:
    plan = spec.plan
    environment = rank_environment(plan.ranks_per_gpu, plan.nccl_library, os.environ)
    environment |= library_environment(plan.disaggregation_transfer_backend, environment)
    process = subprocess.Popen(
        [sys.executable, "-m", "interlock.engine.worker"],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(spec.stacks,),
        env=environment,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # a process that is gone already tells why by its exit code
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    return process
