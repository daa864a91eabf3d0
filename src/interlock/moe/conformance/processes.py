"""Rank processes of a suite: started here, watched, and ended together.

The first failure counts: when a rank raises or dies, the others are ended, because they would only wait.
Ranks are forked from a server that has imported torch and computed nothing: starting one takes milliseconds.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from interlock.errors import InterlockError
from interlock.parallel.launch import Rendezvous, joined_world
from interlock.parallel.topology import Groups

Result = TypeVar("Result")

PRELOADED = [__name__, "torch._inductor.config"]
"""Imported once by the server that ranks are forked from; the second is what turning on deterministic
algorithms imports."""


def run_ranks(
    work: Callable[..., Result],
    ranks: int,
    *arguments: object,
    attn_dp_size: int | None = None,
    ep_size: int | None = None,
    backend: str = "gloo",
    timeout: float = 600.0,
    collective_timeout: float = 60.0,
) -> list[Result]:
    """``work(groups, *arguments)`` in each of ``ranks`` processes; the results by rank.

    Args:
        work: a function of an importable module.
        attn_dp_size, ep_size: how the world is cut; both are ``ranks`` by default.
        timeout: seconds for the whole run.

    Raises:
        InterlockError: a rank raised (its traceback is in the message), died, or the time is over.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    sizes = (attn_dp_size or ranks, ep_size or ranks)
    with tempfile.TemporaryDirectory(prefix="interlock-ranks-") as folder:
        processes: list[BaseProcess] = []
        ends: list[Connection] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_rank_main,
                    args=(
                        *(theirs, work.__module__, work.__qualname__, list(sys.path)),
                        *(rank, ranks, sizes, backend, str(Path(folder) / "store"), collective_timeout),
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
    backend: str,
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
        with joined_world(rendezvous, attn_dp_size=attn_dp_size, ep_size=ep_size, backend=backend) as groups:
            end.send((True, _run(work, groups, arguments)))
    except BaseException:
        end.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def _run(work: Callable[..., Result], groups: Groups, arguments: tuple[object, ...]) -> Result:
    with torch.inference_mode():
        return work(groups, *arguments)
