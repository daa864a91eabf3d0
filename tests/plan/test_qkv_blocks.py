"""Whole blocks that cover a rank's heads: geometry, and the very weights that they hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.checkpoint.qkv import part_rows
from interlock.checkpoint.reader import Checkpoint
from interlock.kernels.fp8_blocks import stack_rows
from interlock.models.card_reader import read_model_card
from interlock.models.mimo_v2.weights import tensor_specs
from interlock.nn.attention import heads_of
from interlock.parallel.sharding import shard_heads
from interlock.plan.qkv_blocks import BLOCK, PARTS, Stored, blocks_of_ranks, part_blocks
from tests.plan.machines import mimo_card, tiny_card
from tests.tiny import flash, tiny_folder, v25

FULL, WINDOW = (layer.attention for layer in mimo_card(num_hidden_layers=2).layers)


@pytest.mark.parametrize("chunks", [0, 1, 4])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_every_rank_of_mimo_has_covers(chunks: int, size: int) -> None:
    for kind in (FULL, WINDOW):
        for _, blocks in blocks_of_ranks(Stored(kind, chunks), size):
            assert blocks is not None
            assert blocks.size % BLOCK == 0
            assert blocks.columns <= 2 * len(blocks.rows) * blocks.heads * blocks.width


def test_covers_of_a_chunk() -> None:
    """Chunks of 3392 rows are 26 blocks and a half; k begins with a block, v within the one k ends in."""
    stored = Stored(FULL, 4)
    q, k, v = (part_blocks(stored, part, range(64) if part == "q" else range(4)) for part in PARTS)
    assert (q.is_dense, q.rows[1]) == (True, range(3392, 3392 + 3072))
    assert (k.rows[1], k.size, k.offset) == (range(3392 + 3072, 3392 + 3328), 256, 0)
    assert (v.rows[1], v.size, v.offset) == (range(3392 + 3200, 2 * 3392), 256, 64)


def test_runs_that_do_not_lie_alike_have_none() -> None:
    """Two k heads of 96 rows in each of two chunks of 416: the second begins elsewhere in its block."""
    kind = replace_heads(num_heads=4, num_kv_heads=2, head_dim=80, v_head_dim=80)
    assert part_blocks(Stored(kind, 1), "k", range(2)) is not None
    assert part_blocks(Stored(kind, 2), "q", range(4)) is None


def replace_heads(**changes: int) -> object:
    import msgspec

    return msgspec.structs.replace(tiny_card().layers[0].attention, **changes)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([2, 4, 8]),
    group=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([32, 64, 96, 128, 192]),
    value=st.sampled_from([32, 64, 128]),
    size=st.sampled_from([1, 2, 4]),
    fused=st.booleans(),
)
def test_covers_hold_the_heads_and_begin_with_a_block(
    heads: int, group: int, width: int, value: int, size: int, fused: bool
) -> None:
    kind = replace_heads(num_heads=heads * group, num_kv_heads=heads, head_dim=width, v_head_dim=value)
    if (heads % size and size % heads) or heads * group % size:
        return
    stored = Stored(kind, heads if fused else 0)
    for rank in range(size):
        own = shard_heads(kind, size, rank)
        for part in PARTS:
            mine = own.q if part == "q" else own.kv
            blocks = part_blocks(stored, part, mine)
            if blocks is None:
                continue
            runs = part_rows(kind, chunks=stored.chunks, part=part, heads=mine)
            for run, rows in zip(runs, blocks.rows, strict=True):
                assert rows.start <= run.start < run.stop <= rows.stop
                assert rows.start % stored.grid_rows(part) % BLOCK == 0
                assert rows.start // stored.grid_rows(part) == (rows.stop - 1) // stored.grid_rows(part)
                assert run.start - rows.start == blocks.offset
                assert len(rows) <= blocks.size


@pytest.mark.parametrize("spec", [v25(), flash(fp8=True)], ids=["chunked", "split"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_columns_of_a_cover_are_the_weights_of_the_heads(spec, size: int) -> None:
    """Bit for bit, for every rank, layer kind and part of a real file."""
    folder = tiny_folder(spec)
    card = read_model_card(folder)
    with Checkpoint(folder, card) as source:
        source.validate(list(tensor_specs(card)), ())
        chunks = 4 if spec.qkv == "chunked" else 0
        for layer in (0, 1):
            kind, prefix = card.layers[layer].attention, f"model.layers.{layer}.self_attn."
            for rank in range(size):
                own = shard_heads(kind, size, rank)
                for part in PARTS:
                    heads = own.q if part == "q" else own.kv
                    name = f"{prefix}{part if not chunks else 'qkv'}_proj.weight"
                    blocks = part_blocks(Stored(kind, chunks), part, heads)
                    packed = stack_rows(
                        [
                            source.read_fp8(name, rows=[run]).padded(blocks.size, card.hidden_size)
                            for run in blocks.rows
                        ]
                    )
                    got = heads_of(packed.dequantised(torch.float32).T.contiguous(), blocks)
                    rows = part_rows(kind, chunks=chunks, part=part, heads=heads)
                    want = source.read(name, rows=rows).T.reshape(card.hidden_size, len(heads), -1)
                    assert torch.equal(got, want)
