"""The GPU kernels on a CPU, through Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/kernels``.

Skipped where Triton is not installed (the CPU builds of torch bring none) or does not interpret. Limits of
the interpreter (Triton 3.6): loops need numpy before 2.4, bfloat16 products are wrong (so the GEMMs run in
float32 here), and casts to e4m3 lose a carry into the exponent (so only scales and places are compared).
The GPU suite has no such limits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interlock.kernels.base import ExpertRows, PackedExperts
from interlock.kernels.torch_reference import TorchKernels
from interlock.kernels.triton.attention_tiles import AttentionTile
from interlock.kernels.triton.expert_tensors import ExpertTensors
from interlock.kernels.triton.row_blocks import reference_lists, reference_quantise
from interlock.kernels.triton.tuned import MoeConfig, Tile
from tests.kernels.cases import paged_case
from tests.kernels.triton_cases import random_routes, reference_lanes, relative

triton = pytest.importorskip("triton", reason="Triton is not installed: torch's CPU builds bring none")
if not triton.knobs.runtime.interpret:
    pytest.skip("set TRITON_INTERPRET=1 to run the GPU kernels on the CPU", allow_module_level=True)

from interlock.kernels.triton import moe, norm, router, row_lists  # noqa: E402
from interlock.kernels.triton.attention import paged_attention  # noqa: E402
from interlock.kernels.triton.fp8_rows import quantise_rows, quantise_to_places  # noqa: E402
from interlock.kernels.triton.kernels import TritonKernels  # noqa: E402

KERNELS = TritonKernels()
REFERENCE = TorchKernels()


@pytest.mark.parametrize(("tokens", "k", "experts", "block_rows"), [
    (1, 8, 16, 16), (16, 8, 16, 16), (17, 4, 5, 16), (70, 2, 3, 32), (150, 8, 33, 16)])  # fmt: skip
@pytest.mark.parametrize("unused", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("launches", [1, 3])
def test_row_lists_equal_a_stable_sort(tokens, k, experts, block_rows, unused, launches, monkeypatch) -> None:
    monkeypatch.setattr(row_lists, "LANES_AT_ONCE", 4096 if launches == 1 else 0)
    k = min(k, experts)
    ids, weights = random_routes(tokens, k, experts, device="cpu", unused=unused)
    got = row_lists.token_lists(ids, weights, experts, block_rows)
    want = reference_lists(ids, weights, experts, block_rows)
    blocks = int(got.block_count)
    assert blocks == int(want.block_count)
    assert int(got.end) == int(want.end)
    assert torch.equal(got.blocks[:, :blocks], want.blocks)
    assert bool((got.blocks[0, blocks:] == -1).all())
    for name in ("source", "target", "weight"):
        assert torch.equal(getattr(got, name)[: want.places], getattr(want, name)), name
    if got.place_of_lane is not None:
        live = ids >= 0
        assert torch.equal(got.target[got.place_of_lane[live]], live.flatten().nonzero()[:, 0].int())
        assert bool((got.place_of_lane[~live] == -1).all())


@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.parametrize("launches", [1, 3])
def test_rows_are_quantised_beside_the_lists(tokens, launches, monkeypatch) -> None:
    monkeypatch.setattr(row_lists, "LANES_AT_ONCE", 4096 if launches == 1 else 0)
    ids, weights = random_routes(tokens, 4, 5, device="cpu", unused=0.2)
    x = torch.randn(tokens, 1280)
    lists, values, scales = row_lists.lists_and_rows(x, ids, weights, 5, 16)
    alone = row_lists.token_lists(ids, weights, 5, 16)
    blocks, places = int(alone.block_count), int((ids >= 0).sum())
    assert torch.equal(lists.blocks[:, :blocks], alone.blocks[:, :blocks])
    for name in ("source", "target", "weight"):
        assert torch.equal(getattr(lists, name)[:places], getattr(alone, name)[:places]), name
    wanted, wanted_scales = quantise_rows(x)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_lists_with_room_for_more_are_walked_over(monkeypatch) -> None:
    monkeypatch.setattr(moe, "SPARSE_PROGRAMS", 3)
    config = MoeConfig(16, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    experts = float32_experts(4, 96, 64)
    counts = torch.tensor([0, 17, 3, 0], dtype=torch.int32)
    x = torch.randn(4 * 40, 96)
    lists = row_lists.segment_lists(counts, None, 40, 160, None, 16)
    assert lists.sparse
    out = torch.full((160, 96), float("nan"))
    moe.compute(x, None, experts, lists, out, config)
    filled = torch.cat((torch.arange(40, 57), torch.arange(80, 83)))
    ids = torch.tensor([1] * 17 + [2] * 3)[:, None]
    want = reference_lanes(x[filled], ids, torch.ones(20, 1), experts)[:, 0]
    assert relative(out[filled], want) < 1e-5
    rest = torch.ones(160, dtype=torch.bool)
    rest[filled] = False
    assert bool(out[rest].isnan().all())


def test_segments_are_cut_into_blocks() -> None:
    counts = torch.tensor([0, 1, 40, 17], dtype=torch.int32)
    psum = torch.tensor([0, 1, 56, 81], dtype=torch.int32)
    lists = row_lists.segment_lists(counts, psum, 0, 96, None, 16)
    rows = [tuple(block) for block in lists.blocks.T[: int(lists.block_count)].tolist()]
    assert rows == [
        (1, 0, 1, 0, 1),
        (2, 16, 32, 1, 3),
        (2, 32, 48, 1, 3),
        (2, 48, 56, 1, 3),
        (3, 64, 80, 4, 2),
        (3, 80, 81, 4, 2),
    ]
    assert int(lists.end) == 81
    slab = row_lists.segment_lists(counts, None, 48, 4 * 48, None, 16)
    assert int(slab.end) == 3 * 48 + 17
    assert slab.blocks[1, : int(slab.block_count)].tolist() == [48, 96, 112, 128, 144, 160]


def test_top_k_equals_torch() -> None:
    logits, bias = torch.randn(9, 24), torch.randn(24) * 0.1
    ids, weights = router.top_k(logits, bias, 3, sigmoid=True, normalise=True)
    want = (logits.sigmoid() + bias).topk(3).indices.sort(1).values
    assert torch.equal(ids, want)
    chosen = logits.sigmoid().gather(1, want)
    assert relative(weights, chosen / chosen.sum(1, keepdim=True)) < 1e-6


def test_sum_skips_lanes_without_an_expert() -> None:
    rows = torch.randn(5, 3, 200)
    ids = torch.tensor([[0, 1, 2], [-1, 0, 1], [-1, -1, 2], [-1, -1, -1], [3, 4, 5]])
    rows[ids < 0] = float("nan")
    got = KERNELS.sum_lanes(rows, ids, torch.float32)
    assert torch.equal(got, REFERENCE.sum_lanes(rows, ids, torch.float32))


def float32_experts(experts: int, hidden: int, inter: int) -> ExpertTensors:
    return ExpertTensors(
        torch.randn(experts, 2 * inter, hidden) * 0.1, torch.randn(experts, hidden, inter) * 0.1
    )


def test_grouped_gemms() -> None:
    config = MoeConfig(16, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    experts = float32_experts(3, 96, 64)
    ids, weights = random_routes(20, 2, 3, device="cpu", unused=0.2)
    x = torch.randn(20, 96)
    out = torch.full((20, 2, 96), float("nan"))
    moe.compute(x, None, experts, row_lists.token_lists(ids, weights, 3, 16), out.flatten(0, 1), config)
    live = ids >= 0
    want = reference_lanes(x, ids, weights, experts)
    assert relative(out[live], want[live]) < 1e-5
    assert bool(out[~live].isnan().all())


@pytest.mark.parametrize("shape", [(1, 64), (3, 200), (2, 3, 96)])
def test_norms_and_swiglu_equal_the_torch_kernels(shape) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    assert relative(KERNELS.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)) < 1e-6
    for got, want in zip(
        KERNELS.add_rms_norm(x, residual, weight, 1e-5),
        REFERENCE.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert relative(got, want) < 1e-6
    assert relative(KERNELS.silu_and_mul(x), REFERENCE.silu_and_mul(x)) < 1e-6


def test_rope_and_store_equals_the_torch_kernels() -> None:
    tokens, heads, kv_heads, width, value_width = 5, 4, 2, 24, 16
    q, k, v = (
        torch.randn(tokens, heads, width),
        torch.randn(tokens, kv_heads, width),
        torch.randn(tokens, kv_heads, 16),
    )
    caches = [[torch.full((3, 4, kv_heads, size), 5.0) for size in (width, value_width)] for _ in range(2)]
    arguments = {
        "positions": torch.tensor([0, 3, 8, 2, 1]),
        "cos_sin": torch.randn(9, 8),
        "slots": torch.tensor([0, 7, -1, 11, 4]),
        "value_scale": 0.7,
    }
    got = KERNELS.rope_and_store(q.clone(), k, v, k_cache=caches[0][0], v_cache=caches[0][1], **arguments)
    want = REFERENCE.rope_and_store(q, k, v, k_cache=caches[1][0], v_cache=caches[1][1], **arguments)
    for ours, theirs in ((got, want), *zip(*caches, strict=True)):
        assert relative(ours, theirs) < 1e-6


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "lengths", [[(1, 1), (1, 70), (0, 3), (1, 9)], [(40, 40), (3, 90), (0, 5)], [(1, 600)]]
)
def test_paged_attention_equals_float64(window, sinks, lengths) -> None:
    case = paged_case(lengths, nh=6, kvh=2, hd=24, vd=16, window=window, sinks=sinks, padding=1)
    got = KERNELS.paged_attention(case.q, **case.arguments())
    assert relative(got, case.in_float64()) < 1e-5
    assert bool((got[-1] == 0).all())


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("tile", [
    AttentionTile(16, 16, 4, 2, 0, 32), AttentionTile(16, 32, 4, 2, 0, 32, ids_ahead=True),
    AttentionTile(32, 16, 4, 2, 99, 16, ids_ahead=True), AttentionTile(64, 32, 4, 2, 99, 32)])  # fmt: skip
@pytest.mark.parametrize("lengths", [[(1, 1), (1, 70), (0, 3), (1, 33)], [(24, 40), (1, 50)]])
def test_attention_tiles(window, tile, lengths) -> None:
    case = paged_case(lengths, nh=4, kvh=2, hd=16, vd=16, window=window, sinks=True, padding=1)
    got = paged_attention(case.q, tile=tile, **case.arguments())
    assert relative(got, case.in_float64()) < 1e-5
    assert bool((got[-1] == 0).all())


@pytest.mark.parametrize("window", [None, 20])
def test_bits_do_not_depend_on_the_width_of_the_page_table(window) -> None:
    """A captured decode step has the widest table there is, an eager one as wide as its longest sequence."""
    case = paged_case([(1, 60), (1, 9)], nh=4, kvh=2, hd=16, vd=16, window=window, sinks=True)
    empty = torch.full((2, 64 - case.page_table.shape[1]), -1, dtype=torch.int32)
    wide = replace(case, page_table=torch.cat([case.page_table, empty], dim=1))
    tile = AttentionTile(16, 16, 4, 2, 99, 32, ids_ahead=True)
    captured = paged_attention(wide.q, tile=tile, **wide.arguments())
    eager = paged_attention(case.q, tile=tile, max_keys=64 * 16, **case.arguments())
    assert torch.equal(eager, captured)
    by_its_own_width = paged_attention(case.q, tile=tile, **case.arguments())
    assert torch.equal(by_its_own_width, captured) == (window is not None), "else the test shows nothing"


def test_expert_mlp_takes_any_lists() -> None:
    tensors = float32_experts(2, 64, 128)
    experts = PackedExperts(2, 64, 128, torch.bfloat16, tensors, 0)
    rows = ExpertRows(
        offsets=torch.tensor([0, 3, 5]),
        source=torch.tensor([4, 0, 2, 1, 4]),
        target=torch.tensor([6, 1, 0, 5, 3]),
        weight=torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25]),
    )
    x = torch.randn(5, 64)
    got, want = torch.full((2, 7, 64), 3.0).unbind(0)
    KERNELS.expert_mlp(x, experts, rows, got)
    plain = REFERENCE.pack_experts(tensors.gate_up, tensors.down)
    REFERENCE.expert_mlp(x, plain, rows, want)
    assert relative(got, want) < 1e-5
    assert bool((got[[2, 4]] == 3.0).all())


def test_scales_equal_the_reference() -> None:
    x = torch.randn(6, 256).bfloat16()
    x[0, :128] = 0
    assert torch.equal(quantise_rows(x)[1], reference_quantise(x)[1])


def test_quantised_rows_go_to_their_places() -> None:
    x, places = torch.randn(3, 128), torch.tensor([[2, -1], [0, 3], [1, 4]], dtype=torch.int32)
    values, scales = quantise_to_places(x, places)
    plain, want_scales = quantise_rows(x)
    for token, row in enumerate(places.tolist()):
        for place in (place for place in row if place >= 0):
            assert torch.equal(values[place].float(), plain[token].float())
            assert torch.equal(scales[:, place], want_scales[:, token])


def test_norm_quantises_what_it_would_have_returned() -> None:
    x, residual, weight = torch.randn(4, 256), torch.randn(4, 256), torch.randn(256)
    plain, _ = norm.add_rms_norm(x, residual, weight, 1e-5)
    rows, _ = norm.add_rms_norm_quantised(x, residual, weight, 1e-5)
    values, scales = rows.values, rows.scales
    want, want_scales = quantise_rows(plain)
    assert torch.equal(values.float(), want.float())
    assert torch.equal(scales, want_scales)


def test_norm_without_a_residual_quantises_too() -> None:
    x, weight = torch.randn(4, 384), torch.randn(384)
    rows, total = norm.add_rms_norm_quantised(x, None, weight, 1e-5)
    want, want_scales = quantise_rows(norm.rms_norm(x, weight, 1e-5))
    assert total is x
    assert torch.equal(rows.values.float(), want.float())
    assert torch.equal(rows.scales, want_scales)


@pytest.mark.parametrize("width", [128, 384, 1152])
def test_silu_quantises_what_it_would_have_returned(width) -> None:
    gate_up = torch.randn(3, 2 * width)
    rows = norm.silu_and_mul_quantised(gate_up)
    want, want_scales = quantise_rows(norm.silu_and_mul(gate_up))
    assert torch.equal(rows.values.float(), want.float())
    assert torch.equal(rows.scales, want_scales)
