"""The Triton runners' declarations anywhere; ``run`` in every layout through Triton's interpreter.

``TRITON_INTERPRET=1 pytest tests/moe/test_triton_runner.py`` runs the GEMMs in float32, since the interpreter
cannot multiply bfloat16; the fp8 kernels run in the GPU suite.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from interlock.errors import InterlockError
from interlock.kernels.availability import triton_unavailable
from interlock.kernels.registry import get_kernels
from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.a2a.rows import ContiguousRows, ExpertInput, MaskedRows, ReplicatedRows
from interlock.moe.experts.base import RunnerSpec
from interlock.moe.experts.registry import expert_runners
from interlock.moe.experts.torch.runner import TorchRunner
from interlock.moe.terms import Layout

HIDDEN, WIDTH, EXPERTS = 96, 40, 3


@pytest.mark.parametrize(
    ("name", "formats"),
    [("triton", {"bfloat16", "float32", "fp8_block"}), ("triton_fp8", {"fp8_block"})],
)
def test_runners_are_declared_without_triton(name, formats) -> None:
    declared = expert_runners().get(name)
    assert declared.layouts == frozenset(Layout)
    assert declared.devices == {"cuda"}
    assert declared.weight_formats == formats
    assert declared.packages == ("triton",)
    check = "import sys, interlock.moe.experts.registry as r; r.expert_runners(); "
    check += "sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_kernel_set_is_refused_where_triton_is_missing(monkeypatch) -> None:
    monkeypatch.setattr("interlock.kernels.registry.triton_unavailable", lambda: "no triton here")
    with pytest.raises(InterlockError, match="no triton here"):
        get_kernels("triton", threads=1)


def interpreted() -> None:
    problem = triton_unavailable()
    if problem is not None:
        pytest.skip(problem)
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.skip("set TRITON_INTERPRET=1 to run the GPU kernels on the CPU")


def layouts() -> dict[str, ExpertInput]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.tensor([[0, 2], [-1, 1], [1, 2], [-1, -1], [0, 1]])
    counts = torch.tensor([3, 0, 17], dtype=torch.int32)
    psum = torch.tensor([3, 8, 25], dtype=torch.int32)
    return {
        "replicated": ReplicatedRows(
            torch.randn(5, HIDDEN, generator=rng), ids, torch.rand(5, 2, generator=rng)
        ),
        "contiguous": ContiguousRows(
            torch.randn(32, HIDDEN, generator=rng), psum, counts, 8, torch.rand(32, generator=rng)
        ),
        "masked": MaskedRows(
            torch.randn(3, 20, HIDDEN, generator=rng), counts, torch.rand(3, 20, generator=rng)
        ),
        "no tokens": ReplicatedRows(
            torch.randn(0, HIDDEN), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
        ),
    }


def filled(rows: ExpertInput) -> torch.Tensor:
    if isinstance(rows, ReplicatedRows):
        return rows.ids >= 0
    place = torch.arange(rows.rows.shape[-2])
    if isinstance(rows, MaskedRows):
        return place[None, :] < rows.counts[:, None]
    spans = [
        (place >= end - count) & (place < end) for end, count in zip(rows.psum, rows.counts, strict=True)
    ]
    return torch.stack(spans).any(0)


@pytest.mark.parametrize("layout", ["replicated", "contiguous", "masked", "no tokens"])
def test_run_equals_the_torch_runner(layout) -> None:
    interpreted()
    from interlock.moe.experts.triton.runner import TritonRunner

    spec = RunnerSpec(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=TorchKernels(),
    )
    runners = TritonRunner(spec), TorchRunner(spec)
    for expert in range(EXPERTS):
        weights = [torch.randn(shape) * 0.2 for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        for runner in runners:
            runner.load_expert(expert, *weights)
    for runner in runners:
        runner.finish_loading()
    rows = layouts()[layout]
    if isinstance(rows, MaskedRows):
        rows = replace(rows, results=torch.full_like(rows.rows, torch.nan))
    got, want = (runner.run(rows) for runner in runners)
    assert not isinstance(rows, MaskedRows) or got is rows.results
    assert got.shape == want.shape
    live = filled(rows)
    torch.testing.assert_close(got[live], want[live], rtol=1e-4, atol=1e-5)
    receipt = runners[0].observed()
    assert (receipt.name, receipt.calls) == ("triton", 1)
    assert receipt.weight_bytes > 0
