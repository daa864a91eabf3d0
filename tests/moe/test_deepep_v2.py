"""Backend ``deepep_v2`` against a double of ElasticBuffer that moves rows and enforces its rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.deepep_v2.buffer import share_of_sms
from interlock.moe.conformance.processes import run_ranks
from tests.moe import deepep_work


@pytest.mark.parametrize("ranks", [2, 3])
def test_conformance(ranks: int) -> None:
    """Every layout, dtype and size that is declared, bit for bit, with arrival orders that change."""
    for found in run_ranks(deepep_work.conformance, ranks, 40, 7):
        assert found.failures == []
        assert found.cases == 40


@pytest.mark.parametrize(("ranks_per_gpu", "sms"), [(1, 0), (2, 66), (4, 32), (8, 16), (100, 4)])
def test_ranks_of_one_gpu_fit_on_it_together(
    ranks_per_gpu: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks fill an SM and wait for those of the peers: more than fit would wait for ever."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )
    spec = SimpleNamespace(ranks_per_gpu=ranks_per_gpu, device=torch.device("cuda"))
    assert share_of_sms(cast(DispatcherSpec, spec)) == sms
