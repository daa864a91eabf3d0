"""What ``bench moe`` counts: bytes, operations, rows, and the roofline."""

from __future__ import annotations

import pytest
import torch

from interlock.bench.layer import (
    LayerPoint,
    LayerShape,
    Skipped,
    choose_runners,
    count_work,
    make_rows,
    run_layer,
)
from interlock.bench.layer_run import layer_shape
from interlock.bench.limits import Limits
from interlock.bench.statistics import Figure
from interlock.errors import Refusal
from interlock.kernels.registry import get_kernels
from interlock.moe.terms import Layout

SHAPE = LayerShape(hidden=32, expert_width=16, experts=6, top_k=2, dtype="float32")
LIMITS = Limits(bandwidth=10e9, flops=50e9, read_by="", computed_by="")
CPU = torch.device("cpu")


def test_bytes_and_operations_by_hand() -> None:
    """Three tokens on experts {0, 1}, {1, 4}, {1, -}: five lanes, three experts touched."""
    ids = torch.tensor([[0, 1], [1, 4], [1, -1]])
    work = count_work(SHAPE, ids, layer_weight_bytes=6 * 3 * 32 * 16 * 4)
    assert (work.lanes, work.touched) == (5, 3)
    assert work.weight_bytes == 3 * 3 * 32 * 16 * 4
    assert work.nbytes == work.weight_bytes + 3 * 32 * 4 + 5 * 32 * 4
    assert work.flops == 6 * 32 * 16 * 5


def test_the_roofline_is_the_longer_of_both() -> None:
    assert LIMITS.seconds(nbytes=10e9, flops=1) == 1.0
    assert LIMITS.seconds(nbytes=1, flops=100e9) == 2.0
    work = count_work(SHAPE, torch.tensor([[0, 1]]), 1000)
    point = LayerPoint("cpu", "masked", 1, Figure((4e-3, 2e-3, 3e-3)), work, limit=1.5e-3, copies=1)
    assert point.share_of_limit == pytest.approx(0.5)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_every_layout_computes_the_same_rows(tokens: int) -> None:
    """The layouts that are compared hold the same work: their sums over lanes agree."""
    (runner,) = choose_runners(["torch"], "cpu", "torch", "float32")
    from interlock.bench.layer import _load

    layer = _load(runner, SHAPE, get_kernels("torch", threads=1), CPU, seed=3)
    totals = []
    for layout in Layout:
        rows, ids = make_rows(SHAPE, layout, tokens, runner.alignment, CPU, seed=1)
        assert rows.layout is layout
        assert ids.shape == (tokens, SHAPE.top_k)
        assert (ids[:, 0] < ids[:, 1]).all()
        out = layer.run(rows)
        if layout is Layout.MASKED:
            counts = torch.bincount(ids.flatten(), minlength=SHAPE.experts)
            out = torch.cat([out[expert, :count] for expert, count in enumerate(counts.tolist())])
        elif layout is Layout.CONTIGUOUS:
            out = out[: ids.numel()]
        totals.append(out.reshape(-1, SHAPE.hidden).double().sum(0))
    assert torch.allclose(totals[0], totals[1], atol=1e-5)
    assert torch.allclose(totals[0], totals[2], atol=1e-5)


def test_points_of_every_runner_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each declared layout is measured at each number of tokens; too large a slab is named instead."""
    monkeypatch.setattr("interlock.bench.layer.MAX_SLAB_BYTES", 6 * 8 * 32 * 4)
    runners = choose_runners(["torch"], "cpu", "torch", "float32")
    found = list(
        run_layer(
            SHAPE,
            runners,
            (1, 9),
            get_kernels("torch", threads=1),
            CPU,
            LIMITS,
            rounds=2,
            working_set=3 * SHAPE.weight_bytes,
            seed=0,
            tick=lambda _: None,
        )
    )
    measured = [point for point in found if isinstance(point, LayerPoint)]
    skipped = [point for point in found if isinstance(point, Skipped)]
    assert {(p.layout, p.tokens) for p in measured} == {
        ("contiguous", 1), ("contiguous", 9), ("masked", 1), ("replicated", 1), ("replicated", 9)
    }  # fmt: skip
    assert all(p.copies == 3 and len(p.figure.samples) == 2 and p.figure.least > 0 for p in measured)
    assert [(p.layout, p.tokens) for p in skipped] == [("masked", 9)]
    assert "slab" in skipped[0].reason


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Refusal, match="does not work on cuda"):
        choose_runners(["cpu"], "cuda", "torch", "float32")
    with pytest.raises(Refusal, match="more than 4 experts"):
        layer_shape(None, hidden=8, expert_width=8, experts=4, top_k=5, dtype=None)
