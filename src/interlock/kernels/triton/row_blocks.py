"""Host side of the row lists: their static sizes, and what they must hold. No Triton here."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FEW_LANES = 128
"""Lanes up to which one program builds the whole list."""
LANES_AT_ONCE = 2048
"""Lanes up to which the whole list is built by one launch; at 4,096 three launches take as long."""


@dataclass(frozen=True, slots=True)
class RowLists:
    """Places 0..P-1 grouped by expert, cut into blocks of at most ``block_rows`` places of one expert.

    Attributes:
        source: int32 [P], input row of each place; None where place p reads row p.
        target: int32 [P], output row of each place; None where place p writes row p.
        weight: float32 [P], factor of each place's result; None for 1.
        blocks: int32 [5, B]: expert (-1 behind the last block), first place, one past the last place, first
            block of the same expert, number of blocks of the same expert.
        block_count: int32 [1], number of blocks in use.
        end: int32 [1], one past the last place in use.
        places: P.
        place_of_lane: int32 [n, k], place of each lane or -1, where it was made.
        one_block_an_expert: no expert has more than one block.
        sparse: few of the B blocks are expected to be in use.
    """

    source: torch.Tensor | None
    target: torch.Tensor | None
    weight: torch.Tensor | None
    blocks: torch.Tensor
    block_count: torch.Tensor
    end: torch.Tensor
    places: int
    block_rows: int
    place_of_lane: torch.Tensor | None = None
    one_block_an_expert: bool = False
    sparse: bool = False

    @property
    def max_blocks(self) -> int:
        return self.blocks.shape[1]


def max_row_blocks(places: int, experts: int, block_rows: int) -> int:
    """Upper bound of blocks for ``places`` rows spread over ``experts`` in any way.

    Every expert with rows adds at most one partial block to the places // block_rows full ones.
    """
    return max(1, min(places, places // block_rows + min(experts, places)))


def max_slab_blocks(slab_rows: int, experts: int, block_rows: int) -> int:
    """Blocks of a slab whose experts hold ``slab_rows`` rows each, all of them filled."""
    return max(1, experts * -(-slab_rows // block_rows))


def int32_arrays(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Arrays int32 of these sizes in one allocation, each on a boundary of 16 bytes.

    So that kernels, which are compiled for the alignment of their arguments, do not depend on the sizes.
    """
    padded = [-(-size // 4) * 4 for size in sizes]
    parts = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def part_of_chunk(chunk: int) -> int:
    """Lanes of a chunk that one program places: it compares them with all before them in the chunk."""
    return min(chunk, 64 if chunk <= 256 else 128)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def reference_lists(
    ids: torch.Tensor, weights: torch.Tensor | None, experts: int, block_rows: int
) -> RowLists:
    """What the kernels of ``route_lists`` must write, in plain torch (with host synchronisation).

    ids int64 [n, k], -1 for lanes without a place; weights float32 [n, k]. Lists hold the live places only.
    """
    lanes = ids.flatten()
    order = torch.sort(torch.where(lanes < 0, experts, lanes), stable=True).indices
    target = order[: int((lanes >= 0).sum())]
    counts = torch.bincount(lanes[lanes >= 0], minlength=experts).tolist()
    blocks: list[tuple[int, ...]] = []
    start = 0
    for expert, count in enumerate(counts):
        leader, size = len(blocks), -(-count // block_rows)
        for first in range(start, start + count, block_rows):
            blocks.append((expert, first, min(first + block_rows, start + count), leader, size))
        start += count
    table = torch.tensor(blocks, dtype=torch.int32, device=ids.device).reshape(-1, 5)
    return RowLists(
        source=(target // ids.shape[1]).to(torch.int32),
        target=target.to(torch.int32),
        weight=None if weights is None else weights.flatten()[target],
        blocks=table.T,
        block_count=torch.tensor([len(blocks)], dtype=torch.int32, device=ids.device),
        end=torch.tensor([start], dtype=torch.int32, device=ids.device),
        places=len(target),
        block_rows=block_rows,
    )


def reference_quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, h] -> (e4m3 [n, h], float32 scales [h / 128, n]); scale = max |group| / 448, at least 1e-12 /
    448."""
    groups = x.to(torch.float32).unflatten(1, (-1, 128))
    scale = groups.abs().amax(2).clamp_min(1e-12) / 448.0
    quantised = (groups / scale[:, :, None]).clamp(-448, 448).flatten(1).to(torch.float8_e4m3fn)
    return quantised, scale.T.contiguous()
