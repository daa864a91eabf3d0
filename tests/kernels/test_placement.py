"""Scatter, gather, slab repack and SwiGLU with quantisation against their references.

On a GPU (``pytest -m gpu``), or on a CPU through Triton's interpreter (``TRITON_INTERPRET=1 pytest -m gpu``),
whose casts to e4m3 lose a carry now and then, so that values are compared after scaling.
"""

from __future__ import annotations

import pytest
import torch

from interlock.kernels.triton import placement
from interlock.kernels.triton.row_blocks import reference_quantise
from tests.kernels.triton_cases import random_routes, relative

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")

from interlock.kernels.triton import placed_rows  # noqa: E402
from interlock.kernels.triton.fp8_rows import quantise_to_places  # noqa: E402
from interlock.kernels.triton.placed_rows import Entries  # noqa: E402

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
BOUND = 0.1 if triton.knobs.runtime.interpret else 5e-3
"""Of quantised values."""


@pytest.fixture
def device() -> str:
    if triton.knobs.runtime.interpret:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1")


def wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e4m3 [R, c] with scales [c / 128, R] in float64."""
    return (values.double().unflatten(1, (-1, 128)) * scale_rows(scales)[:, :, None]).flatten(1)


def scale_rows(scales: torch.Tensor) -> torch.Tensor:
    return scales.T.double()


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "alignment"),
    [(1, 1, 1, 128), (5, 3, 7, 128), (33, 4, 6, 16), (130, 8, 256, 128), (600, 2, 3, 128)],
)
@pytest.mark.parametrize("unused", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("counted_chunk", [1, 1 << 30])
def test_aligned_places(device, tokens, k, experts, alignment, unused, counted_chunk, monkeypatch) -> None:
    monkeypatch.setattr(placed_rows, "COUNTED_CHUNK", counted_chunk)
    if device == "cpu" and tokens > 100:
        tokens //= 4
    ids, _ = random_routes(tokens, min(k, experts), experts, device=device, unused=unused)
    got = placed_rows.aligned_places(ids, experts, alignment)
    want = placement.reference_places(ids, experts, alignment)
    for name in ("of_lane", "counts", "psum", "live"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.rows == want.rows
    assert got.rows % alignment == 0
    live = placed_rows.live_blocks(got.counts, got.psum, got.rows, alignment)
    assert torch.equal(live, want.live)


def test_the_bound_of_rows_is_reached() -> None:
    for lanes, experts, alignment in [(1, 4, 128), (5, 4, 128), (4, 4, 2), (300, 3, 128), (7, 100, 16)]:
        used = min(lanes, experts)
        ids = torch.cat((torch.arange(used), torch.zeros(lanes - used, dtype=torch.int64)))[:, None]
        places = placement.reference_places(ids, experts, alignment)
        padded = (places.counts + alignment - 1) // alignment * alignment
        assert int(padded.sum()) <= places.rows
        assert int(places.psum.max()) <= places.rows


def test_scatter_and_gather(device) -> None:
    ids, weights = random_routes(21, 3, 5, device=device, unused=0.3)
    places = placement.reference_places(ids, 5, 16)
    x = torch.randn(21, 384, device=device).to(BF16)
    values, scales = quantise_to_places(x, places.of_lane, places.rows)
    plain, plain_scales = reference_quantise(x)
    used = places.of_lane[places.of_lane >= 0].long()
    want = placement.reference_scatter(wide(plain, plain_scales), places.of_lane, places.rows)
    assert relative(wide(values, scales)[used], want[used]) < BOUND
    spread = placement.reference_scatter(plain_scales.T.contiguous(), places.of_lane, places.rows)
    assert torch.allclose(scales.T[used], spread[used], rtol=1e-6)
    moved, moved_scales = placed_rows.scatter_rows(plain, plain_scales.T, places.of_lane, places.rows)
    assert torch.equal(wide(moved, moved_scales)[used], want[used])
    rows = torch.full((places.rows, 200), float("nan"), device=device, dtype=BF16)
    rows[used] = torch.randn(len(used), 200, device=device).to(BF16)
    for factors in (weights, None):
        got = placed_rows.gather(rows, places.of_lane, factors, torch.float32)
        assert relative(got, placement.reference_gather(rows, places.of_lane, factors, torch.float32)) < 1e-6
        lanes = placed_rows.gather_lanes(rows, places.of_lane, factors)
        live = ids >= 0
        assert relative(lanes[live], placement.reference_lanes(rows, places.of_lane, factors)[live]) < 5e-3
    assert bool((got[(ids < 0).all(1)] == 0).all())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["aligned", "slab"])
def test_silu_and_quantise_of_filled_rows(device, weighted, layout) -> None:
    inter, rows = 256, 24
    counts = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    gate_up = torch.full((rows, 2 * inter), float("nan"), device=device, dtype=BF16)
    filled = torch.cat([torch.arange(8 * entry, 8 * entry + int(n)) for entry, n in enumerate(counts)])
    gate_up[filled] = torch.randn(len(filled), 2 * inter, device=device).to(BF16)
    weights = torch.rand(rows, device=device) if weighted else None
    if layout == "aligned":
        scales = torch.empty(inter // 128, rows, device=device)
        entries = Entries(counts, 8, scale_entry_stride=8, scale_stride=rows)
    else:
        scales = torch.empty(3, inter // 128, 8, device=device)
        entries = Entries(counts, 8, scale_entry_stride=inter // 128 * 8, scale_stride=8)
    act = placed_rows.silu_quantise(gate_up, entries, weights, scales)
    if layout == "slab":
        scales = scales.transpose(0, 1).flatten(1)
    want = placement.reference_silu_quantise(gate_up[filled], None if weights is None else weights[filled])
    assert torch.allclose(scales[:, filled], want[1], rtol=1e-5)
    assert relative(wide(act, scales)[filled], wide(*want)) < BOUND


@pytest.mark.parametrize("out_rows", [4, 8])
def test_quantise_of_filled_rows(device, out_rows) -> None:
    """Also into stretches that are longer than those of the input."""
    counts = torch.tensor([4, 0, 1], dtype=torch.int32, device=device)
    x = torch.randn(12, 256, device=device).to(BF16)
    scales = torch.empty(3, 2, out_rows, device=device)
    values = placed_rows.quantise_entries(x, Entries(counts, 4, 2 * out_rows, out_rows), scales, out_rows)
    flat = scales.transpose(0, 1).flatten(1)
    want = reference_quantise(x[torch.tensor([0, 1, 2, 3, 8])])
    filled = torch.tensor([0, 1, 2, 3, 2 * out_rows])
    assert values.shape == (3 * out_rows, 256)
    assert torch.allclose(flat[:, filled], want[1], rtol=1e-6)
    assert relative(wide(values, flat)[filled], wide(*want)) < BOUND


@pytest.mark.parametrize("width", [3, 130])
def test_slab_repack(device, width) -> None:
    ids = torch.tensor([[0], [2], [2], [0], [2], [3]], device=device)
    places = placement.reference_places(ids, 5, 4)
    rows = torch.randn(places.rows, width, device=device)
    slab = placed_rows.to_slab(rows, places.counts, places.psum, 6)
    want = placement.reference_to_slab(rows, places.counts, places.psum, 6)
    scales = placed_rows.scales_to_slab(rows, places.counts, places.psum, 6)
    assert scales.stride() == (width * 8, 1, 8)
    back = placed_rows.from_slab(want, places.counts, places.psum, places.rows)
    returned = placement.reference_from_slab(want, places.counts, places.psum, places.rows)
    for expert, (count, end) in enumerate(zip(places.counts.tolist(), places.psum.tolist(), strict=True)):
        assert torch.equal(slab[expert, :count], want[expert, :count])
        assert torch.equal(scales[expert, :count], want[expert, :count])
        assert torch.equal(back[end - count : end], returned[end - count : end])
        assert torch.equal(back[end - count : end], rows[end - count : end])


def test_fp8_rows_move_to_a_slab(device) -> None:
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    psum = torch.tensor([2, 5], dtype=torch.int32, device=device)
    rows = torch.randn(8, 128, device=device).to(torch.float8_e4m3fn)
    slab = placed_rows.to_slab(rows, counts, psum, 2)
    assert torch.equal(slab[0].view(torch.uint8), rows[:2].view(torch.uint8))
    assert torch.equal(slab[1, :1].view(torch.uint8), rows[4:5].view(torch.uint8))
