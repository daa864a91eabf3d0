"""The row order of a fused qkv tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.checkpoint.fp8_names import scale_rows
from interlock.checkpoint.qkv import part_rows
from interlock.checkpoint.reader import Checkpoint
from interlock.demo.tiny import TinySpec, tiny_weights
from interlock.errors import CheckpointError
from interlock.models.card_reader import read_model_card
from interlock.models.mimo_v2.weights import tensor_specs
from interlock.parallel.sharding import HeadShard, shard_heads
from interlock.plan.card import AttentionCard
from tests.tiny import tiny_folder, v25

# a chunk of 4 * 192 + 192 + 64 = 1024 rows is a whole number of blocks in every layer kind
AMBIGUOUS = v25(v_head_dim=64, swa_num_kv_heads=4)


def qkv_rows(attention: AttentionCard, chunks: int, heads: HeadShard) -> list[range]:
    """Stored rows of a rank's heads: q, then k, then v."""
    parts = {"q": heads.q, "k": heads.kv, "v": heads.kv}
    return [
        run
        for part, held in parts.items()
        for run in part_rows(attention, chunks=chunks, part=part, heads=held)
    ]


def layout(spec: TinySpec, requested: str = "auto") -> str:
    folder = tiny_folder(spec)
    card = read_model_card(folder)
    with Checkpoint(folder, card, qkv_layout=requested) as checkpoint:
        return checkpoint.validate(list(tensor_specs(card)), ()).qkv_layout


@pytest.mark.parametrize(
    ("rows", "chunks", "grid"), [(13568, 4, 108), (13568, 1, 106), (14848, 4, 116), (27136, 8, 216)]
)
def test_scale_rows_of_the_released_tensors(rows: int, chunks: int, grid: int) -> None:
    """The scale shapes of MiMo-V2.5 (full, as if plain, sliding) and of Pro."""
    assert scale_rows(rows, 128, chunks) == grid


@pytest.mark.parametrize("qkv", ["plain", "chunked"])
def test_the_layout_is_detected_from_scale_rows(qkv: str) -> None:
    assert layout(v25(qkv=qkv)) == qkv
    assert layout(v25(qkv=qkv), qkv) == qkv


@pytest.mark.parametrize("qkv", ["plain", "chunked"])
def test_the_user_cannot_contradict_the_scale_rows(qkv: str) -> None:
    other = {"plain": "chunked", "chunked": "plain"}[qkv]
    with pytest.raises(CheckpointError, match=f"show that the layout is {qkv}"):
        layout(v25(qkv=qkv), other)


@pytest.mark.parametrize(
    "spec", [AMBIGUOUS, v25(fp8=False), v25(fp8=False, qkv="plain")], ids=["whole blocks", "chunked", "plain"]
)
def test_an_ambiguous_layout_is_refused_unless_the_user_says_which(spec: TinySpec) -> None:
    with pytest.raises(CheckpointError, match=r"--qkv-layout plain .* or --qkv-layout chunked"):
        layout(spec)
    assert layout(spec, spec.qkv) == spec.qkv


def test_one_chunk_is_plain() -> None:
    assert layout(v25(fp8=False, num_kv_heads=1, swa_num_kv_heads=1)) == "plain"


ATTENTION = st.builds(
    lambda kv, group, tp, hd, vd: (
        AttentionCard(
            num_heads=kv * group,
            num_kv_heads=kv,
            head_dim=hd,
            v_head_dim=vd,
            rope_theta=1e4,
            rotary_dim=2,
        ),
        tp,
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(2, 5),
    st.integers(1, 4),
).filter(lambda pair: pair[0].num_heads % pair[1] == 0)


@given(pair=ATTENTION, chunks=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_shards_of_both_layouts_hold_the_same_heads(pair: tuple[AttentionCard, int], chunks: int) -> None:
    """H01: with more ranks than kv heads each rank has the head that its queries read, once."""
    attention, tp = pair
    chunks = min(chunks, attention.num_kv_heads)
    hd, vd = attention.head_dim, attention.v_head_dim
    q = torch.arange(attention.num_heads * hd)
    k = 1000 + torch.arange(attention.num_kv_heads * hd)
    v = 2000 + torch.arange(attention.num_kv_heads * vd)
    chunked = torch.cat(
        [t for trio in zip(q.chunk(chunks), k.chunk(chunks), v.chunk(chunks), strict=True) for t in trio]
    )
    group = attention.num_heads // attention.num_kv_heads
    for rank in range(tp):
        heads = shard_heads(attention, tp, rank)
        assert [head // group for head in heads.q] == sorted(
            [kv for kv in heads.kv for _ in range(len(heads.q) // len(heads.kv))]
        )
        expected = torch.cat(
            [
                q[heads.q.start * hd : heads.q.stop * hd],
                k[heads.kv.start * hd : heads.kv.stop * hd],
                v[heads.kv.start * vd : heads.kv.stop * vd],
            ]
        )
        for count, stored in ((1, torch.cat([q, k, v])), (chunks, chunked)):
            runs = qkv_rows(attention, count, heads)
            assert torch.equal(torch.cat([stored[run.start : run.stop] for run in runs]), expected)


def test_a_rank_with_one_chunk_reads_it_in_one_piece() -> None:
    attention = AttentionCard(
        num_heads=64, num_kv_heads=4, head_dim=192, v_head_dim=128, rope_theta=1e7, rotary_dim=64
    )
    heads = shard_heads(attention, 4, 2)
    q, k, v = qkv_rows(attention, 4, heads)
    assert (q.start, k.start, v.start, v.stop) == (2 * 3392, q.stop, k.stop, 3 * 3392)


@pytest.mark.parametrize("spec", [v25(), v25(qkv="plain"), v25(fp8=False)], ids=["fp8", "plain", "bf16"])
def test_fused_rows_equal_split_rows(spec: TinySpec) -> None:
    folder, truth = tiny_folder(spec), tiny_weights(spec).reference
    card = read_model_card(folder)
    with Checkpoint(folder, card, qkv_layout=spec.qkv) as checkpoint:
        report = checkpoint.validate(list(tensor_specs(card)), ())
        for layer in (0, 1):
            attention = card.layers[layer].attention
            chunks = spec.num_kv_heads if report.qkv_layout == "chunked" else 1
            heads = shard_heads(attention, 1, 0)
            prefix = f"model.layers.{layer}.self_attn."
            rows = qkv_rows(attention, chunks, heads)
            fused = checkpoint.read(prefix + "qkv_proj.weight", rows=rows)
            assert torch.equal(fused, torch.cat([truth[f"{prefix}{n}_proj.weight"] for n in "qkv"]))


def test_a_wrong_order_is_visible(tmp_path: Path) -> None:
    """Control: the plain rows of a chunked tensor are other numbers, so the test above can fail."""
    folder, truth = tiny_folder(v25()), tiny_weights(v25()).reference
    card = read_model_card(folder)
    with Checkpoint(folder, card) as checkpoint:
        checkpoint.validate(list(tensor_specs(card)), ())
        prefix = "model.layers.0.self_attn."
        plain = checkpoint.read(prefix + "qkv_proj.weight")
        assert not torch.equal(plain, torch.cat([truth[f"{prefix}{n}_proj.weight"] for n in "qkv"]))
