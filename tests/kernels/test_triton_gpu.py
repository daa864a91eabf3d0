"""The GPU kernels against float64 references and the torch kernels, on a CUDA device (``pytest -m gpu``)."""

from __future__ import annotations

import pytest
import torch

from interlock.kernels.base import ExpertRows
from interlock.kernels.torch_reference import TorchKernels
from interlock.kernels.triton.row_blocks import reference_lists, reference_quantise
from interlock.kernels.triton.tuned import MoeConfig, Tile
from tests.kernels.cases import paged_case
from tests.kernels.triton_cases import random_routes, reference_lanes, relative

pytestmark = pytest.mark.gpu
REFERENCE = TorchKernels()
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("triton", reason="the GPU kernels are written in Triton")
    from interlock.kernels.triton.kernels import TritonKernels

    return TritonKernels()


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    rng = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(*shape, device="cuda", generator=rng) * scale).to(dtype)


def packed(kernels, experts: int, hidden: int, inter: int, *, fp8: bool):
    gate_up = draw(experts, 2 * inter, hidden, scale=hidden**-0.5)
    down = draw(experts, hidden, inter, scale=inter**-0.5, seed=1)
    return kernels.pack_experts_fp8(gate_up, down) if fp8 else kernels.pack_experts(gate_up, down)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block_rows"),
    [(1, 8, 256, 16), (16, 8, 256, 16), (17, 8, 256, 16), (300, 3, 5, 16), (512, 8, 256, 32), (5000, 8,
    384, 128), (40, 1, 1, 16), (2049, 8, 8, 64)],
)  # fmt: skip
@pytest.mark.parametrize("unused", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("launches", [1, 3])
def test_row_lists_equal_a_stable_sort(
    kernels, tokens, k, experts, block_rows, unused, launches, monkeypatch
) -> None:
    from interlock.kernels.triton import row_lists

    monkeypatch.setattr(row_lists, "LANES_AT_ONCE", 1 << 14 if launches == 1 else 0)
    ids, weights = random_routes(tokens, k, experts, device="cuda", unused=unused)
    got, want = (
        row_lists.token_lists(ids, weights, experts, block_rows),
        reference_lists(ids, weights, experts, block_rows),
    )
    assert int(got.block_count) == int(want.block_count) <= got.max_blocks
    blocks = int(got.block_count)
    assert torch.equal(got.blocks[:, :blocks], want.blocks)
    assert bool((got.blocks[0, blocks:] == -1).all())
    for name in ("source", "target", "weight"):
        assert torch.equal(getattr(got, name)[: want.places], getattr(want, name)), name


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (77, 4096), (5, 7168), (3, 384)])
def test_quantise_equals_the_reference(kernels, rows, width) -> None:
    from interlock.kernels.triton.fp8_rows import quantise_rows

    x = draw(rows, width)
    x[0, :128] = 0
    for got, want in zip(quantise_rows(x), reference_quantise(x), strict=True):
        assert torch.equal(got.float(), want.float())


TILES = {
    "bf16-small": (False, MoeConfig(16, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4))),
    "bf16-large": (False, MoeConfig(128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 3))),
    "fp8-small": (True, MoeConfig(16, Tile(128, 128, 4, 4), Tile(128, 128, 4, 4))),
    "fp8-middle": (True, MoeConfig(64, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
    "fp8-pipelined": (True, MoeConfig(128, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), pipelined=True)),
}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("tokens", [1, 7, 100, 700])
@pytest.mark.parametrize(("hidden", "inter"), [(512, 256), (768, 384)])
def test_replicated_experts(kernels, tiles, tokens, hidden, inter) -> None:
    from interlock.kernels.triton import moe, row_lists

    fp8, config = TILES[tiles]
    experts = packed(kernels, 8, hidden, inter, fp8=fp8).data
    ids, weights = random_routes(tokens, 3, 8, device="cuda", seed=tokens, unused=0.2)
    x = draw(tokens, hidden)
    out = torch.full((tokens, 3, hidden), float("nan"), dtype=BF16, device="cuda")
    lists = row_lists.token_lists(ids, weights, 8, config.block_rows)
    moe.compute(x, None, experts, lists, out.flatten(0, 1), config)
    live = ids >= 0
    rounds = moe.rounds_gate_up(experts, lists, config)
    want = reference_lanes(x, ids, weights, experts, rounds_gate_up=rounds)
    assert relative(out[live], want[live]) < 1e-2
    assert bool(out[~live].isnan().all()), "a lane without an expert was written"
    total = kernels.sum_lanes(out, ids, BF16)
    assert relative(total, want.sum(1)) < 1e-2


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kind", ["contiguous", "slab"])
def test_grouped_rows(kernels, tiles, kind) -> None:
    from interlock.kernels.triton import moe, row_lists

    fp8, config = TILES[tiles]
    hidden, inter, alignment, slab = 512, 256, 16, 304
    experts = packed(kernels, 5, hidden, inter, fp8=fp8).data
    counts = torch.tensor([0, 1, 300, 17, 130], dtype=torch.int32)
    starts = torch.arange(5, dtype=torch.int32) * slab
    places = 5 * slab
    if kind == "contiguous":
        padded = (counts + alignment - 1) // alignment * alignment
        starts = torch.cumsum(padded, 0, dtype=torch.int32) - padded
        places = int(padded.sum())
    x, weights = draw(places, hidden), torch.rand(places, device="cuda")
    live = torch.zeros(places, dtype=torch.bool)
    ids = torch.full((places, 1), -1)
    for expert in range(5):
        part = slice(int(starts[expert]), int(starts[expert] + counts[expert]))
        ids[part], live[part] = expert, True
    x[~live.cuda()] = float("nan")
    psum = (starts + counts).cuda() if kind == "contiguous" else None
    lists = row_lists.segment_lists(counts.cuda(), psum, slab, places, weights, config.block_rows)
    out = torch.full((places, hidden), float("nan"), dtype=BF16, device="cuda")
    moe.compute(x, None, experts, lists, out, config)
    clean = torch.where(live.cuda()[:, None], x, 0)
    rounds = moe.rounds_gate_up(experts, lists, config)
    want = reference_lanes(clean, ids.cuda(), weights[:, None], experts, rounds_gate_up=rounds)[:, 0]
    assert relative(out[live.cuda()], want[live.cuda()]) < 1e-2
    assert bool(out[~live.cuda()].isnan().all())


@pytest.mark.parametrize("fp8", [False, True])
def test_expert_mlp_equals_the_torch_kernels(kernels, fp8) -> None:
    experts = packed(kernels, 6, 512, 256, fp8=fp8)
    counts = [0, 40, 1, 0, 200, 3]
    total = sum(counts)
    rows = ExpertRows(
        offsets=torch.tensor([0, *counts]).cumsum(0).cuda(),
        source=torch.randint(0, 50, (total,)).cuda(),
        target=torch.randperm(300)[:total].cuda(),
        weight=torch.rand(total).cuda(),
    )
    x = draw(50, 512)
    out = torch.full((300, 512), 7.0, dtype=torch.float32, device="cuda")
    kernels.expert_mlp(x, experts, rows, out)
    ids = torch.full((total, 1), -1)
    for expert in range(6):
        ids[int(rows.offsets[expert]) : int(rows.offsets[expert + 1])] = expert
    want = reference_lanes(x[rows.source], ids.cuda(), rows.weight[:, None], experts.data)[:, 0]
    assert relative(out[rows.target], want) < 1e-2
    untouched = torch.ones(300, dtype=torch.bool, device="cuda")
    untouched[rows.target] = False
    assert bool((out[untouched] == 7.0).all())


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("experts", [8, 128, 384])
def test_top_k_equals_torch(kernels, sigmoid, experts) -> None:
    from interlock.kernels.triton import router

    logits, bias = draw(100, experts, dtype=torch.float32), draw(experts, dtype=torch.float32, scale=0.1)
    ids, weights = router.top_k(logits, bias, 6, sigmoid=sigmoid, normalise=True, scaling=2.5)
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(1)
    want = (scores + bias.double()).topk(6).indices.sort(1).values
    assert torch.equal(ids, want)
    chosen = scores.gather(1, want)
    assert relative(weights, chosen / chosen.sum(1, keepdim=True) * 2.5) < 1e-6


@pytest.mark.parametrize("rows", [1, 5, 33, 128, 700])
@pytest.mark.parametrize(("width", "depth"), [(768, 512), (2560, 4096), (200, 256)])
def test_fp8_linear(kernels, rows, width, depth) -> None:
    weight = kernels.pack_linear_fp8(draw(width, depth, scale=depth**-0.5))
    x = draw(rows, depth)
    got = kernels.linear(x, weight)
    values, scale = reference_quantise(x)
    wide = (values.double().unflatten(1, (-1, 128)) * scale.T[:, :, None].double()).flatten(1)
    spread = weight.data.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = wide @ (weight.data.weight.double() * spread[:width, :depth]).T
    assert got.dtype == BF16
    assert relative(got, want) < 4e-3
    assert relative(kernels.linear(x, weight, out_dtype=torch.float32), want) < 1e-3


@pytest.mark.parametrize("x_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_linear_equals_the_torch_kernels(kernels, x_dtype, out_dtype) -> None:
    x, weight = draw(9, 256, dtype=x_dtype), draw(96, 256, scale=0.05)
    got = kernels.linear(x, kernels.pack_linear(weight), out_dtype=out_dtype)
    assert got.dtype == (out_dtype or x_dtype)
    assert relative(got, x.double() @ weight.double().T) < 4e-3


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 64), (33, 4096), (4, 3, 192), (2, 6144)])
def test_norms_equal_the_torch_kernels(kernels, dtype, shape) -> None:
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    weight = draw(shape[-1], dtype=dtype, seed=2)
    bound = 4e-3 if dtype == BF16 else 1e-6
    assert relative(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)) < bound
    got, want = (
        kernels.add_rms_norm(x, residual, weight, 1e-5),
        REFERENCE.add_rms_norm(x, residual, weight, 1e-5),
    )
    assert relative(got[0], want[0]) < bound
    assert torch.equal(got[1], want[1])


def test_norm_quantises_what_it_would_have_returned(kernels) -> None:
    from interlock.kernels.triton import norm

    x, residual, weight = draw(33, 4096), draw(33, 4096, seed=1), draw(4096, seed=2)
    plain, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    rows, again = norm.add_rms_norm_quantised(x, residual, weight, 1e-5)
    values, scales = rows.values, rows.scales
    want, want_scales = reference_quantise(plain)
    assert torch.equal(total, again)
    assert torch.equal(values.float(), want.float())
    assert torch.equal(scales, want_scales)


@pytest.mark.parametrize("rows", [1, 40])
def test_fused_quantisation_equals_separate_steps(kernels, rows) -> None:
    from interlock.kernels.triton.fp8_rows import quantise_rows

    x, weight, gate_up = draw(rows, 4096), draw(4096, seed=2), draw(rows, 2 * 1152)
    normed, total = kernels.add_rms_norm_quantised(x, None, weight, 1e-5)
    assert total is x
    silu = kernels.silu_and_mul_quantised(gate_up)
    for got, plain in ((normed, kernels.rms_norm(x, weight, 1e-5)), (silu, kernels.silu_and_mul(gate_up))):
        for ours, wanted in zip((got.values, got.scales), quantise_rows(plain), strict=True):
            assert torch.equal(ours.float(), wanted.float())
    linear = kernels.pack_linear_fp8(draw(512, 4096, scale=4096**-0.5))
    assert torch.equal(
        kernels.linear_quantised(normed, linear), kernels.linear(kernels.rms_norm(x, weight, 1e-5), linear)
    )


def test_silu_and_mul_equals_the_torch_kernels(kernels) -> None:
    gate_up = draw(17, 1536)[:, : 2 * 700]
    assert relative(kernels.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)) < 4e-3


@pytest.mark.parametrize(("heads", "kv_heads", "width", "value_width", "rotary"), [
    (64, 4, 192, 128, 64), (64, 8, 192, 128, 64), (4, 2, 24, 16, 8), (32, 4, 128, 128, 128)])  # fmt: skip
def test_rope_and_store_equals_the_torch_kernels(
    kernels, heads, kv_heads, width, value_width, rotary
) -> None:
    tokens, pages, page_size = 21, 9, 16
    fused = draw(tokens, heads * width + kv_heads * (width + value_width))
    q, k, v = fused.split([heads * width, kv_heads * width, kv_heads * value_width], dim=1)
    q, k, v = (
        q.unflatten(1, (heads, width)),
        k.unflatten(1, (kv_heads, width)),
        v.unflatten(1, (kv_heads, value_width)),
    )
    slots = torch.randperm(pages * page_size)[:tokens].cuda()
    slots[3] = -1
    caches = [
        [
            torch.full((pages, page_size, kv_heads, size), 5.0, dtype=BF16, device="cuda")
            for size in (width, value_width)
        ]
        for _ in range(2)
    ]
    arguments = {
        "positions": torch.randint(0, 500, (tokens,)).cuda(),
        "cos_sin": draw(500, rotary, dtype=torch.float32),
        "slots": slots,
        "value_scale": 0.6,
    }
    want = REFERENCE.rope_and_store(q, k, v, k_cache=caches[1][0], v_cache=caches[1][1], **arguments)
    got = kernels.rope_and_store(q, k, v, k_cache=caches[0][0], v_cache=caches[0][1], **arguments)
    for ours, theirs in ((got, want), (caches[0][0], caches[1][0]), (caches[0][1], caches[1][1])):
        assert relative(ours, theirs) < 2e-3


SHAPES = {
    "flash-full": (64, 4, 192, 128),
    "flash-window": (64, 8, 192, 128),
    "qwen": (32, 4, 128, 128),
    "tiny": (4, 2, 24, 16),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 128, 1])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("lengths", [
    [(1, 1), (1, 2), (1, 700), (1, 63), (1, 5000)], [(200, 200), (1, 300), (77, 500), (0, 5), (3, 64)],
    [(130, 2000)], [(1, 9000)]])  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_paged_attention_equals_float64(kernels, shape, window, sinks, lengths, dtype) -> None:
    heads, kv_heads, width, value_width = SHAPES[shape]
    page_size = 64
    counts = [-(-length // page_size) for _, length in lengths]
    order = torch.randperm(sum(counts) + 3)
    table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    used = 0
    for row, (count, (queries, length)) in enumerate(zip(counts, lengths, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        if window is not None:
            table[row, : max(0, length - queries - window + 1) // page_size] = -1
    tokens = sum(queries for queries, _ in lengths)
    k_cache = draw(sum(counts) + 3, page_size, kv_heads, width, dtype=dtype)
    v_cache = draw(sum(counts) + 3, page_size, kv_heads, value_width, dtype=dtype)
    q = draw(tokens + 2, heads, width, dtype=dtype)
    arguments = {
        "page_table": table.cuda(),
        "query_start": torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int().cuda(),
        "kv_len": torch.tensor([length for _, length in lengths]).int().cuda(),
        "scale": width**-0.5,
        "window": window,
        "sinks": draw(heads, dtype=torch.float32) if sinks else None,
    }
    got = kernels.paged_attention(q, k_cache=k_cache, v_cache=v_cache, **arguments)
    want = REFERENCE.paged_attention(
        q.double(), k_cache=k_cache.double(), v_cache=v_cache.double(), **arguments
    )
    assert relative(got, want) < (1e-2 if dtype == BF16 else 1e-5)
    assert bool((got[tokens:] == 0).all())
    exact = kernels.paged_attention(q[:tokens], k_cache=k_cache, v_cache=v_cache, **arguments)
    assert relative(exact, want[:tokens]) < (1e-2 if dtype == BF16 else 1e-5)


ATTENTION_TILES = {
    "plain": (128, 64, 8, 2),
    "three-stages": (128, 64, 8, 3),
    "64-rows": (64, 64, 4, 2),
    "no-pipeline": (64, 128, 4, 1),
    "specialised-128": (128, 128, 4, 2, 0, 256, True),
    "specialised-64": (128, 64, 4, 3, 0, 256, True),
    "splits": (64, 32, 4, 2, 10**6, 32),
    "ids-ahead": (64, 64, 4, 3, 0, 256, False, True),
    "ids-ahead-splits": (64, 64, 8, 2, 10**6, 64, False, True),
}


@pytest.mark.parametrize("tile", ATTENTION_TILES)
@pytest.mark.parametrize(("kv_heads", "window", "page_size"), [
    (4, None, 16), (8, 128, 16), (4, 128, 64), (8, None, 64)])  # fmt: skip
@pytest.mark.parametrize("lengths", [
    [(200, 200), (1, 300), (77, 500), (0, 5), (3, 64), (129, 1200)], [(1, 150), (1, 1), (0, 9), (1, 1333)],
    [(400, 400)]])  # fmt: skip
def test_attention_tiles(kernels, tile, kv_heads, window, page_size, lengths) -> None:
    """Slots that no key fills hold NaN, and q is a view of wider rows, as behind the qkv projection."""
    from interlock.kernels.triton.attention import paged_attention
    from interlock.kernels.triton.attention_tiles import AttentionTile

    case = paged_case(
        lengths, nh=64, kvh=kv_heads, hd=192, vd=128, page_size=page_size, window=window, sinks=kv_heads == 8,
        dtype=BF16, padding=3,
    )  # fmt: skip
    want = case.in_float64()
    arguments = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    wide = torch.full((len(case.q), 64 * 192 + 320), float("nan"), dtype=BF16, device="cuda")
    q = wide[:, : 64 * 192].unflatten(1, (64, 192))
    q.copy_(case.q)
    got = paged_attention(q, tile=AttentionTile(*ATTENTION_TILES[tile]), **arguments)
    assert relative(got.cpu(), want) < 1e-2
    assert bool((got[-3:] == 0).all())


def test_a_layer_can_be_captured_and_replayed(kernels) -> None:
    from interlock.kernels.triton import moe, router, row_lists

    config = TILES["fp8-small"][1]
    experts = packed(kernels, 8, 512, 256, fp8=True).data
    x, logits = draw(40, 512), draw(40, 8, dtype=torch.float32)

    def layer() -> torch.Tensor:
        ids, weights = router.top_k(logits, None, 3, sigmoid=True, normalise=True)
        lists = row_lists.token_lists(ids, weights, 8, config.block_rows)
        lanes = torch.empty(40, 3, 512, dtype=BF16, device="cuda")
        moe.compute(x, None, experts, lists, lanes.flatten(0, 1), config)
        return kernels.sum_lanes(lanes, ids, BF16)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in range(3):
        x.copy_(draw(40, 512, seed=seed))
        logits.copy_(draw(40, 8, dtype=torch.float32, seed=seed))
        graph.replay()
        assert torch.equal(out, layer())
