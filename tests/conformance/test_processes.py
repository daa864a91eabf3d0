"""Where the ranks of a suite compute, and the environment that they get."""

from __future__ import annotations

import os

import pytest
import torch

from interlock.errors import InterlockError, Refusal
from interlock.moe.conformance import processes
from interlock.moe.conformance.processes import Gpus, run_ranks
from interlock.parallel.topology import Groups
from interlock.plan.nccl import NcclLibrary
from interlock.plan.rehearsal import ENVIRONMENT


def shown(groups: Groups) -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.parametrize(("count", "ranks", "each"), [(1, 4, 4), (4, 4, 1), (8, 2, 1), (2, 3, 2)])
def test_ranks_are_spread_over_the_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, each: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    gpus = Gpus.here(ranks)
    assert gpus.per_gpu == each
    assert bool(gpus.notice) == (each > 1)


def test_without_a_gpu_there_is_none_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InterlockError, match="sees no CUDA device"):
        Gpus.here(2)


def test_an_old_nccl_is_refused_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    old = NcclLibrary(path="/torch/libnccl.so.2", version="2.28.9", of_torch=True)
    monkeypatch.setattr(processes, "nccl_libraries", lambda: (old,))
    with pytest.raises(Refusal, match=r"found 2\.28\.9 \(torch's own\)"):
        run_ranks(shown, 2, gpus=Gpus(2))


def test_ranks_that_share_get_an_environment_and_leave_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = NcclLibrary(path="/extra/libnccl.so.2", version="2.30.7")
    monkeypatch.setattr(processes, "nccl_libraries", lambda: (newer,))
    before = dict(os.environ)
    found = Gpus(2).environment()
    assert ENVIRONMENT.items() <= found.items()
    assert found["LD_PRELOAD"].startswith(newer.path)
    with processes._started_in(found):
        assert dict(os.environ) == found
    assert dict(os.environ) == before
