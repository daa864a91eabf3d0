"""Memory that cannot be shared: what the start says."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from interlock.errors import StartupError
from interlock.moe.a2a.symmetric.memory import share_region
from interlock.parallel.group import SingleGroup

NAME = "torch.distributed._symmetric_memory"


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        ("CUDA driver error: out of memory", "lower --chunked-prefill-size"),
        (
            "rendezvous: detected allocations from overlapping devices",
            "--ranks-per-gpu",
        ),
        ("CUDA driver error: peer access is not supported\nException raised from ...", "must be peers"),
    ],
)
def test_the_start_says_what_would_work(problem: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(problem)

    fake = ModuleType(NAME)
    fake.empty = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, fake)
    monkeypatch.setattr("torch.distributed._symmetric_memory", fake, raising=False)
    group = cast(Any, SimpleNamespace(size=2, rank=0, process_group=None))
    with pytest.raises(StartupError) as told:
        share_region(group, 100, torch.device("cpu"))
    assert problem.partition("\n")[0] in str(told.value)
    assert "Exception raised" not in str(told.value)
    assert advice in str(told.value)


def test_a_rank_of_its_own_shares_nothing() -> None:
    region = share_region(SingleGroup(), 256, torch.device("cpu"))
    assert region.addresses == (region.own.data_ptr(),)
    assert not bool(region.own.any())


def test_a_region_may_be_a_part_of_what_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer torch takes symmetric tensors out of a pool, not at the same place on every rank."""
    block = torch.ones(512, dtype=torch.uint8)
    own = block[128:384]
    fake = ModuleType(NAME)
    fake.empty = lambda *_, **__: own  # type: ignore[attr-defined]
    lease = SimpleNamespace(buffer_ptrs=[1000, block.data_ptr()])
    fake.rendezvous = lambda *_: lease  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, fake)
    monkeypatch.setattr("torch.distributed._symmetric_memory", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def all_gather(start: torch.Tensor) -> torch.Tensor:
        assert start.tolist() == [128]
        return torch.tensor([64, 128])

    group = SimpleNamespace(size=2, rank=1, process_group=None, barrier=lambda: None, all_gather=all_gather)
    region = share_region(cast(Any, group), 256, torch.device("cpu"))
    assert region.addresses == (1064, own.data_ptr())
    assert not bool(own.any())
