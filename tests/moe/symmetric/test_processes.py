"""Ranks as processes that wait for each other, on a CPU: what they do where they share a GPU, in memory that
they share, through Triton's interpreter. It runs a launch's programs one after the other, so that a program
that waited for a later one of its own launch would never end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")
if not triton.knobs.runtime.interpret:
    pytest.skip("set TRITON_INTERPRET=1 to run the GPU kernels on the CPU", allow_module_level=True)

from interlock.kernels.registry import get_kernels  # noqa: E402
from interlock.moe.a2a.contract import DispatcherSpec  # noqa: E402
from interlock.moe.conformance.processes import run_ranks  # noqa: E402
from interlock.moe.placement import place  # noqa: E402
from interlock.moe.terms import Phase  # noqa: E402
from interlock.parallel.topology import Groups  # noqa: E402
from tests.moe.symmetric import without_gpu  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("ranks", "cases"), [(2, 4), pytest.param(3, 24, marks=pytest.mark.slow)])
def test_conformance(ranks: int, cases: int, tmp_path: Path) -> None:
    """The whole suite, misuse and given-up dispatches included, bit for bit."""
    for found in run_ranks(without_gpu.conformance, ranks, str(tmp_path), cases, ranks, timeout=250):
        assert found.failures == []
        assert found.cases == cases


@pytest.mark.parametrize(("ranks", "layers"), [(2, 6), pytest.param(3, 60, marks=pytest.mark.slow)])
def test_layers_without_a_pause(ranks: int, layers: int, tmp_path: Path) -> None:
    """B28: nobody waits for anybody but through the exchange, some steps are given up, layouts change."""
    spec = DispatcherSpec(
        groups=Groups.single(),
        experts=place(6, ranks),
        rank=0,
        num_experts=6,
        top_k=2,
        hidden_size=32,
        row_dtype="bfloat16",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        layouts=without_gpu.LAYOUTS,
        capacity={Phase.PREFILL: 6, Phase.DECODE: 5},
        kernels=get_kernels("torch", threads=1),
        alignment=4,
        ranks_per_gpu=ranks,
    )
    for wrong in run_ranks(without_gpu.layers_in_a_row, ranks, str(tmp_path), layers, spec, timeout=250):
        assert wrong == 0
