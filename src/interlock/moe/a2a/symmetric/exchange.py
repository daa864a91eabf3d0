"""The launches of one rank's dispatch and combine, over a table of addresses: it does not care whether peers
are processes, streams of this process, or (without a GPU) turns of one thread.

Every launch is asynchronous and has static sizes for a given number of tokens, so that it can be captured.

Legend: n tokens, k lanes a token, L experts of this rank, S rows of this rank's memory.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlock.moe.a2a.symmetric import exchange_kernels, flags, row_kernels
from interlock.moe.a2a.symmetric.shape import (
    CHUNK,
    FEW_LANES,
    SECTIONS,
    STATE_BYTES,
    RegionShape,
    power_of_two,
)

LEAST_CHUNK = 128
"""Fewer lanes are counted by the same kernel: every size is compiled."""
ROW_BLOCK = 1024
"""32-bit words of a row that one program copies at once: 4 warps with two 16-byte pieces a thread."""
ROW_WORKERS = 132 * 12
RETURN_WORKERS = 132 * 16
RETURN_TILE = 4
"""Rows of many that a program returns at once, to have more bytes on their way."""
NOTICE_WORDS = 8


@dataclass(frozen=True, slots=True)
class Arrived:
    """What lies in this rank's memory: counts, psum int32 [L]; ``psum - counts`` is where segments start.

    ``many``: rows are expected to be many, as in the contiguous layout.
    """

    counts: torch.Tensor
    psum: torch.Tensor
    many: bool


class Exchange:
    """One rank of an exchange.

    Args:
        shape: equal on all ranks.
        experts: global ids held by each rank.
        own: uint8 [shape.region_bytes] of this rank, zeroed before any rank starts.
        addresses: of every rank's region, in this process's and device's address space.
        notice: int64 [NOTICE_WORDS] that the host can read while the device writes (pinned memory).
        limit: nanoseconds that a peer may be late; without a GPU, how often a flag is looked at.

    Attributes:
        rows: int32 [S, words of a row]; scales float32 [S, groups] or None; weights float32 [S];
            origins int32 [S]; results int32 [T * k, words of a result].
        peers: int64 [sections, R], addresses; owners int32 [E], the rank of each expert; state: counters.
        held: experts of this rank; width: a power of two of ranks; clocked: the device has a clock.
    """

    def __init__(
        self,
        shape: RegionShape,
        experts: Sequence[range],
        rank: int,
        own: torch.Tensor,
        addresses: Sequence[int],
        notice: torch.Tensor,
        limit: int,
    ) -> None:
        self.shape, self.rank, self.limit, self.notice = shape, rank, limit, notice
        device = own.device
        self.device, self.clocked = device, device.type == "cuda"
        self._own = own
        self.rows = self.section("rows", torch.int32).view(shape.slab_rows, -1)
        self.weights = self.section("weights", torch.float32)
        self.origins = self.section("origins", torch.int32)
        self.results = self.section("results", torch.int32).view(shape.lanes, -1)
        self.scales: torch.Tensor | None = None
        if shape.scale_bytes:
            self.scales = self.section("scales", torch.float32).view(shape.slab_rows, -1)
        offsets = shape.offsets()
        table = [[base + offsets[name] for base in addresses] for name in SECTIONS]
        self.peers = torch.tensor(table, dtype=torch.int64, device=device)
        beside = [held.start for held in experts for _ in held]
        self._first_beside = torch.tensor(beside, dtype=torch.int32, device=device)
        owners = [rank for rank, held in enumerate(experts) for _ in held]
        self.owners = torch.tensor(owners, dtype=torch.int32, device=device)
        self.held = experts[rank]
        self.state = torch.zeros(STATE_BYTES // 4, dtype=torch.int32, device=device)
        self._histogram = torch.empty(shape.chunks, shape.bins, dtype=torch.int32, device=device)
        self._targets = torch.empty(shape.lanes, dtype=torch.int64, device=device)
        self.width = power_of_two(shape.ranks)

    @property
    def private_bytes(self) -> int:
        """Bytes that were allocated here, beside the region."""
        tensors = (
            self.peers,
            self._first_beside,
            self.owners,
            self.state,
            self._histogram,
            self._targets,
        )
        return sum(tensor.nbytes for tensor in tensors)

    def section(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A section of this rank's region."""
        start = self.shape.offsets()[name]
        return self._own[start : start + self.shape.sizes()[name]].view(dtype)

    def exchange_counts(
        self, ids: torch.Tensor, slab_rows: int, alignment: int, *, sends: bool = True, waits: bool = True
    ) -> Arrived:
        """Begin a step: tell every rank how many lanes it gets, and find the place of each lane.

        Args:
            ids: int64 [n, k], contiguous, global; -1 for none.
            slab_rows: M of the masked layout; 0 for segments that start at multiples of ``alignment``.
            sends, waits: halves of it, for all ranks in one thread.
        """
        shape, lanes = self.shape, ids.numel()
        few = lanes <= FEW_LANES
        chunk = max(LEAST_CHUNK, power_of_two(lanes)) if few else CHUNK
        chunks = max(1, -(-lanes // chunk))
        common = {"chunk": chunk, "bins": shape.bins}
        if sends and not few:
            exchange_kernels.count_kernel[(chunks,)](
                ids, self._histogram, self.state, self.notice, lanes, shape.num_experts, **common
            )
        counts, psum = torch.empty(2, len(self.held), dtype=torch.int32, device=self.device)
        exchange_kernels.exchange_kernel[(1,)](
            ids, self._histogram, self._targets, counts, psum, self.peers, self._first_beside, self.owners,
            self.state, self.notice, self.rank, shape.ranks, self.held.start, len(self.held),
            shape.num_experts, lanes, chunks, shape.slab_rows, slab_rows, alignment, self.limit,
            few=few, sends=sends, waits=waits, clocked=self.clocked,
            tile=max(1, 4096 // shape.bins), width=self.width, num_warps=8, **common,
        )  # fmt: skip
        if waits and not few:
            exchange_kernels.target_kernel[(chunks,)](
                ids, self._histogram, self.owners, self._targets, self.state, self.notice,
                lanes, shape.num_experts, shape.slab_rows, tile=16, num_warps=8, **common,
            )  # fmt: skip
        return Arrived(counts, psum, many=slab_rows == 0)

    def send_rows(
        self, x: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor, *, waits: bool = True
    ) -> None:
        """x [n, h] (rows of multiples of 16 bytes, at such addresses) to the places that were found.

        scales float32 [n, groups] with dense rows, weights float32 [n, k] contiguous.
        """
        shape = self.shape
        tokens = x.shape[0]
        words = x.view(torch.int32) if tokens else self.rows
        quads = shape.row_bytes // 16
        parts = -(-quads * 4 // ROW_BLOCK)
        block = ROW_BLOCK if parts > 1 else max(128, power_of_two(quads * 4))
        groups = 0 if scales is None else scales.shape[1]
        row_kernels.send_rows_kernel[(max(1, min(tokens, ROW_WORKERS // parts)), parts)](
            words, self.weights if scales is None else scales, weights, self._targets, self.peers,
            self.state, self.notice, self.rank, shape.ranks, tokens, shape.lanes, words.stride(0) // 4,
            quads, 0 if scales is None else scales.stride(0), groups, self.limit,
            lanes=shape.top_k, slots=power_of_two(shape.top_k), block=block,
            group_block=power_of_two(groups) if groups else 0,
            width=self.width, waits=waits, clocked=self.clocked, num_warps=4,
        )  # fmt: skip

    def return_rows(self, results: torch.Tensor, arrived: Arrived, *, waits: bool = True) -> None:
        """results [<= S, h], contiguous, of the rows that arrived, to the lanes of their tokens."""
        shape = self.shape
        words = results.view(torch.int32) if results.shape[0] else self.results
        quads = shape.result_bytes // 16
        parts = -(-quads * 4 // ROW_BLOCK)
        block = ROW_BLOCK if parts > 1 else max(128, power_of_two(quads * 4))
        workers = max(1, min(results.shape[0], RETURN_WORKERS // (len(self.held) * parts)))
        row_kernels.return_rows_kernel[(len(self.held), workers, parts)](
            words, arrived.counts, arrived.psum, self.peers, self.state, self.notice,
            self.rank, shape.ranks, shape.lanes, results.shape[0], quads, self.limit,
            tile=RETURN_TILE if arrived.many else 1,
            block=block, width=self.width, waits=waits, clocked=self.clocked, num_warps=4,
        )  # fmt: skip

    def await_stage(self, stage: int) -> None:
        """Only wait for all ranks' rows (1) or results (2), where sending did not wait."""
        flags.wait_kernel[(1,)](
            self.peers, self.state, self.notice, self.rank, self.shape.ranks, self.limit,
            stage=stage, width=self.width, clocked=self.clocked, num_warps=1,
        )  # fmt: skip
