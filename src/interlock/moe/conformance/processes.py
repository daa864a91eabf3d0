"""Rank processes of a suite: started here, watched, and ended together.

The first failure counts: when a rank raises or dies, the others are ended, because they would only wait.
Ranks on a CPU are forked from a server that has imported torch and computed nothing: starting one takes
milliseconds. Ranks on GPUs are started afresh, since what shares a GPU needs an environment of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from interlock.errors import InterlockError
from interlock.parallel.launch import Rendezvous, joined_world
from interlock.parallel.topology import Groups
from interlock.plan.nccl import nccl_libraries
from interlock.plan.rehearsal import rank_environment, shared_nccl, sharing_notice

Result = TypeVar("Result")

PRELOADED = [__name__, "torch._inductor.config"]
"""Imported once by the server that ranks are forked from; the second is what turning on deterministic
algorithms imports."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a run: consecutive ranks share one, ``per_gpu`` of them."""

    per_gpu: int = 1

    @staticmethod
    def here(ranks: int) -> Gpus:
        """``ranks`` over all GPUs of this machine, as evenly as they can be.

        Raises:
            InterlockError: there is no GPU.
        """
        count = torch.cuda.device_count()
        if count == 0:
            raise InterlockError("this torch sees no CUDA device")
        return Gpus(-(-ranks // count))

    @property
    def notice(self) -> str:
        """What a report says of ranks that share a GPU; "" where none do."""
        return sharing_notice(self.per_gpu)

    def environment(self) -> dict[str, str]:
        """Of every rank. Raises Refusal where NCCL does not let ranks share a GPU."""
        if self.per_gpu == 1:
            return dict(os.environ)
        library = shared_nccl(nccl_libraries(), self.per_gpu)
        return rank_environment(self.per_gpu, library.path, os.environ)


def run_ranks(
    work: Callable[..., Result],
    ranks: int,
    *arguments: object,
    attn_dp_size: int | None = None,
    ep_size: int | None = None,
    gpus: Gpus | None = None,
    timeout: float = 600.0,
    collective_timeout: float = 60.0,
) -> list[Result]:
    """``work(groups, *arguments)`` in each of ``ranks`` processes; the results by rank.

    Args:
        work: a function of an importable module.
        attn_dp_size, ep_size: how the world is cut; both are ``ranks`` by default.
        gpus: where the ranks compute; None for the CPU.
        timeout: seconds for the whole run.

    Raises:
        InterlockError: a rank raised (its traceback is in the message), died, or the time is over.
    """
    context: Any = mp.get_context("forkserver" if gpus is None else "spawn")
    if gpus is None:
        context.set_forkserver_preload(PRELOADED)
    sizes = (attn_dp_size or ranks, ep_size or ranks)
    environment = dict(os.environ) if gpus is None else gpus.environment()
    with tempfile.TemporaryDirectory(prefix="interlock-ranks-") as folder, _started_in(environment):
        processes: list[BaseProcess] = []
        ends: list[Connection] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_rank_main,
                    args=(
                        *(theirs, work.__module__, work.__qualname__, list(sys.path)),
                        *(rank, ranks, sizes, gpus, str(Path(folder) / "store"), collective_timeout),
                        arguments,
                    ),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _collect(ends, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


@contextmanager
def _started_in(environment: dict[str, str]) -> Iterator[None]:
    """Processes that are started meanwhile get ``environment``; multiprocessing has no other way."""
    changed = {
        name: os.environ.get(name) for name in environment if os.environ.get(name) != environment[name]
    }
    os.environ.update({name: environment[name] for name in changed})
    try:
        yield
    finally:
        for name, value in changed.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(ends: list[Connection], processes: list[BaseProcess], timeout: float) -> list[Result]:
    results: dict[int, Result] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        open_ends = [end for rank, end in enumerate(ends) if rank not in results]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(ends))) - results.keys())
            raise InterlockError(f"ranks {missing} did not finish within {timeout:g} s")
        for end in ready:
            rank = next(index for index, candidate in enumerate(ends) if candidate is end)
            try:
                succeeded, value = ends[rank].recv()
            except EOFError as error:
                processes[rank].join(timeout=5)
                code = processes[rank].exitcode
                raise InterlockError(f"rank {rank} died with exit code {code}") from error
            if not succeeded:
                raise InterlockError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ends))]


def _rank_main(
    end: Connection,
    module: str,
    name: str,
    search_path: list[str],
    rank: int,
    ranks: int,
    sizes: tuple[int, int],
    gpus: Gpus | None,
    store_path: str,
    timeout: float,
    arguments: tuple[object, ...],
) -> None:
    sys.path[:] = search_path
    torch.set_num_threads(1)
    # Uninitialised tensors are filled with NaN, so that reading what nobody wrote shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        work = getattr(importlib.import_module(module), name)
        store = FileStore(store_path, ranks) if ranks > 1 else None
        rendezvous = Rendezvous(rank=rank, size=ranks, timeout=timeout, store=store)
        attn_dp_size, ep_size = sizes
        if gpus is not None:
            torch.cuda.set_device(rank // gpus.per_gpu)
        backend = "gloo" if gpus is None else "cpu:gloo,cuda:nccl"
        with joined_world(rendezvous, attn_dp_size=attn_dp_size, ep_size=ep_size, backend=backend) as groups:
            end.send((True, _run(work, groups, arguments)))
    except BaseException:
        end.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def _run(work: Callable[..., Result], groups: Groups, arguments: tuple[object, ...]) -> Result:
    with torch.inference_mode():
        return work(groups, *arguments)
