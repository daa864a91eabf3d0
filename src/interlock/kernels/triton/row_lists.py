"""Row lists of routed experts on one GPU: of routes, with rows quantised beside them, and of rows that are
grouped already. Launches only, no synchronisation.

Legend: n tokens, k lanes a token, h hidden size, E local experts, P places of the row lists.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.kernels.triton import lists_at_once, route_lists
from interlock.kernels.triton.expert_tensors import GROUP
from interlock.kernels.triton.fp8_rows import GROUPS_A_PROGRAM
from interlock.kernels.triton.row_blocks import (
    FEW_LANES,
    LANES_AT_ONCE,
    RowLists,
    int32_arrays,
    max_row_blocks,
    max_slab_blocks,
    part_of_chunk,
    power_of_two,
)


def token_lists(
    ids: torch.Tensor, weights: torch.Tensor | None, experts: int, block_rows: int, *, sparse: bool = False
) -> RowLists:
    """Row lists of ids int64 [n, k] (local expert or -1) and weights float32 [n, k].

    ``sparse``: most lanes are expected to be -1.
    """
    return _Listing.of(ids, weights, experts, block_rows, None).make(sparse=sparse)


def lists_and_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    experts: int,
    block_rows: int,
    *,
    sparse: bool = False,
) -> tuple[RowLists, torch.Tensor, torch.Tensor]:
    """``token_lists``, and beside them ``quantise_rows`` of x [n, h]: e4m3 [n, h], scales [h / 128, n].

    The rows are quantised by programs of a launch that the lists need anyhow.
    """
    rows, width = x.shape
    quantised = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=x.device)
    beside = _Quantisation(x, quantised, scales)
    lists = _Listing.of(ids, weights, experts, block_rows, beside).make(sparse=sparse)
    return lists, quantised, scales


def segment_lists(
    counts: torch.Tensor,
    psum: torch.Tensor | None,
    slab_rows: int,
    places: int,
    weights: torch.Tensor | None,
    block_rows: int,
) -> RowLists:
    """Row lists of rows that are grouped already: contiguous segments (``psum``) or a slab of
    ``slab_rows``."""
    experts = counts.shape[0]
    if psum is None:
        blocks = max_slab_blocks(slab_rows, experts, block_rows)
    else:
        blocks = max_row_blocks(places, experts, block_rows)
    table = torch.empty(5, blocks, dtype=torch.int32, device=counts.device)
    total = torch.empty(2, dtype=torch.int32, device=counts.device)
    route_lists.segment_blocks_kernel[(1,)](
        counts, psum, table, total, experts, slab_rows, blocks,
        has_psum=psum is not None, bins=power_of_two(experts), block_rows=block_rows,
    )  # fmt: skip
    return RowLists(
        None,
        None,
        weights,
        table,
        total[:1],
        total[1:],
        places=places,
        block_rows=block_rows,
        sparse=psum is None,
    )


@dataclass(frozen=True, slots=True)
class _Quantisation:
    """Rows that programs of another launch quantise."""

    x: torch.Tensor
    out: torch.Tensor
    scales: torch.Tensor

    @property
    def programs(self) -> int:
        rows, width = self.x.shape
        return rows * -(-width // (GROUP * GROUPS_A_PROGRAM))

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        return self.x, self.out, self.scales, self.x.stride(0), self.x.shape[0]

    @property
    def constants(self) -> dict[str, int]:
        return {"depth": self.x.shape[1], "groups": GROUPS_A_PROGRAM}


@dataclass(frozen=True, slots=True)
class _Listing:
    """Lists in the making: the routes, and the memory of what is made of them.

    Attributes:
        ids, weights: [n, k]. beside: rows to quantise in the first launch.
        source, target, places: int32 [P]; placed: float32 [P], the weights in order of the places, or None.
        table: int32 [5 * blocks]; total: int32 [2].
    """

    ids: torch.Tensor
    weights: torch.Tensor | None
    experts: int
    block_rows: int
    beside: _Quantisation | None
    source: torch.Tensor
    target: torch.Tensor
    placed: torch.Tensor | None
    places: torch.Tensor
    table: torch.Tensor
    total: torch.Tensor
    blocks: int

    @classmethod
    def of(
        cls,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        experts: int,
        block_rows: int,
        beside: _Quantisation | None,
    ) -> _Listing:
        count = ids.numel()
        blocks = max_row_blocks(count, experts, block_rows)
        source, target, places, table, total = int32_arrays((count, count, count, 5 * blocks, 2), ids.device)
        placed = None if weights is None else torch.empty(count, dtype=torch.float32, device=ids.device)
        return cls(
            ids, weights, experts, block_rows, beside, source, target, placed, places, table, total, blocks
        )

    @property
    def count(self) -> int:
        """Lanes, and with them places."""
        return self.ids.numel()

    @property
    def is_few(self) -> bool:
        """One block an expert holds all that may come, and one program finds the order."""
        return self.count <= FEW_LANES and len(self.ids) <= self.block_rows

    def make(self, *, sparse: bool) -> RowLists:
        place_of_lane = None
        if self.is_few:
            self._by_one_program()
        else:
            place_of_lane = self.places.view(self.ids.shape)
            if self.count <= LANES_AT_ONCE:
                self._by_one_launch()
            else:
                self._by_chunks()
        return RowLists(
            self.source,
            self.target,
            self.placed,
            self.table.view(5, self.blocks),
            self.total[:1],
            self.total[1:],
            places=self.count,
            block_rows=self.block_rows,
            place_of_lane=place_of_lane,
            one_block_an_expert=self.is_few,
            sparse=sparse,
        )

    def _by_one_program(self) -> None:
        width = power_of_two(max(self.count, 16))
        lists = (
            self.ids, self.weights, self.source, self.target, self.placed, self.table, self.total,
            self.count, self.ids.shape[1], self.blocks,
        )  # fmt: skip
        constants = {
            "has_weights": self.weights is not None, "width": width, "num_warps": 4 if width <= 64 else 8
        }  # fmt: skip
        if self.beside is None:
            route_lists.few_lanes_kernel[(1,)](*lists, **constants)
        else:
            route_lists.few_lanes_quantise_kernel[(1 + self.beside.programs,)](
                *lists, *self.beside.arguments, **constants, **self.beside.constants
            )

    def _by_one_launch(self) -> None:
        lists = (
            self.ids, self.weights, self.source, self.target, self.placed, self.places, self.table,
            self.total, self.count, self.ids.shape[1], self.blocks,
        )  # fmt: skip
        part = 64
        constants = {
            "has_weights": self.weights is not None, "step": 1024, "part": part,
            "bins": power_of_two(self.experts + 1), "block_rows": self.block_rows, "num_warps": 4,
        }  # fmt: skip
        programs = 1 + -(-self.count // part)
        if self.beside is None:
            lists_at_once.lists_kernel[(programs,)](*lists, **constants)
        else:
            lists_at_once.lists_quantise_kernel[(programs + self.beside.programs,)](
                *lists, *self.beside.arguments, **constants, **self.beside.constants
            )

    def _by_chunks(self) -> None:
        chunk = 256 if self.count <= 16384 else 1024
        chunks = -(-self.count // chunk)
        bins = power_of_two(self.experts + 1)
        histogram = torch.empty(chunks, bins, dtype=torch.int32, device=self.ids.device)
        if self.beside is None:
            route_lists.histogram_kernel[(chunks,)](
                self.ids, histogram, self.count, chunk=chunk, bins=bins
            )  # fmt: skip
        else:
            route_lists.histogram_quantise_kernel[(chunks + self.beside.programs,)](
                self.ids, histogram, self.count, chunks, *self.beside.arguments,
                chunk=chunk, bins=bins, **self.beside.constants,
            )  # fmt: skip
        route_lists.scan_kernel[(1,)](
            histogram, self.table, self.total, chunks, self.experts, self.blocks,
            bins=bins, tile=max(1, 4096 // bins), block_rows=self.block_rows, num_warps=8,
        )  # fmt: skip
        part = part_of_chunk(chunk)
        route_lists.place_kernel[(chunks, chunk // part)](
            self.ids, self.weights, histogram, self.source, self.target, self.placed, self.places,
            self.count, self.ids.shape[1],
            has_weights=self.weights is not None, chunk=chunk, part=part, bins=bins, tile=16, num_warps=4,
        )  # fmt: skip
