"""Which rows of a block-fp8 q, k or v a rank takes, so that no block of 128 rows is cut. No torch here.

A head of 192 rows begins or ends within a block where the heads before it are no whole blocks (k of four
ranks of MiMo-V2-Flash; k and v of every chunk of a fused tensor of MiMo-V2.5). Then the blocks that cover the
head are taken as they are: the projection has some columns more, which nobody reads.

Legend: a run is a range of stored rows with whole heads of one part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from interlock.checkpoint.qkv import part_rows
from interlock.plan.card import AttentionCard

BLOCK = 128
PARTS = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class PartBlocks:
    """Rows of one part, and where its heads lie in the columns that they give.

    Attributes:
        rows: stored rows of each run, from the first to the last block that the run touches.
        size: rows that each run is padded to, a multiple of 128.
        offset: place of a run's first head in it.
        heads: heads of each run.
        width: columns of a head.
    """

    rows: tuple[range, ...]
    size: int
    offset: int
    heads: int
    width: int

    @staticmethod
    def dense(heads: range, width: int) -> PartBlocks:
        """Heads that follow each other, without anything between them."""
        size = len(heads) * width
        return PartBlocks((range(size),), size, 0, len(heads), width)

    @property
    def columns(self) -> int:
        return len(self.rows) * self.size

    @property
    def is_dense(self) -> bool:
        """Whether every column is one of a head."""
        return self.size == self.heads * self.width


@dataclass(frozen=True, slots=True)
class Stored:
    """How q, k and v of a layer are stored: ``chunks`` is 0 for three tensors, else the chunks of a fused
    one (1: all q rows, then all k rows, then all v rows)."""

    attention: AttentionCard
    chunks: int

    def grid_rows(self, part: str) -> int:
        """Rows after which the scale grid begins again."""
        card = self.attention
        sizes = {
            "q": card.num_heads * card.head_dim,
            "k": card.num_kv_heads * card.head_dim,
            "v": card.num_kv_heads * card.v_head_dim,
        }
        return sum(sizes.values()) // self.chunks if self.chunks else sizes[part]

    def width(self, part: str) -> int:
        return self.attention.v_head_dim if part == "v" else self.attention.head_dim


def part_blocks(stored: Stored, part: str, heads: range) -> PartBlocks | None:
    """Whole blocks that hold ``heads`` of a part; None where its runs do not lie alike."""
    width, grid = stored.width(part), stored.grid_rows(part)
    runs = part_rows(stored.attention, chunks=stored.chunks, part=part, heads=heads)
    covers = [_cover(run, grid) for run in runs]
    found = {
        (run.start - rows.start, -(-len(rows) // BLOCK) * BLOCK)
        for run, rows in zip(runs, covers, strict=True)
    }
    counts = {len(run) // width for run in runs}
    if len(found) > 1 or len(counts) > 1:
        return None
    (offset, size), count = found.pop(), counts.pop()
    blocks = PartBlocks(tuple(covers), size, offset, count, width)
    return blocks if len(runs) == 1 or count == 1 or blocks.is_dense else None


def blocks_of_ranks(stored: Stored, size: int) -> Iterator[tuple[str, PartBlocks | None]]:
    """(part, its blocks) of each of ``size`` attention-TP ranks."""
    from interlock.parallel.sharding import shard_heads

    for rank in range(size):
        heads = shard_heads(stored.attention, size, rank)
        for part in PARTS:
            yield part, part_blocks(stored, part, heads.q if part == "q" else heads.kv)


def _cover(run: range, grid_rows: int) -> range:
    """The run with the rest of its first and its last block, within its grid."""
    grid = run.start // grid_rows * grid_rows
    first = grid + (run.start - grid) // BLOCK * BLOCK
    last = grid + -(-(run.stop - grid) // BLOCK) * BLOCK
    return range(first, max(run.stop, min(last, grid + grid_rows)))
