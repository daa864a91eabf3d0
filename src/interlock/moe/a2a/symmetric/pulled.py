"""The two launches of a step with few tokens: see ``pulled_kernels``. Beside ``Exchange``, on its memory."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch

from interlock.moe.a2a.symmetric import pulled_kernels
from interlock.moe.a2a.symmetric.exchange import Arrived, Exchange
from interlock.moe.a2a.symmetric.shape import PUBLISHERS, power_of_two

WAITING_PROGRAMS = 132 * 4
"""Programs of 8 warps that all ranks of one GPU may have waiting at once: half of what an H200 holds."""
TAKING_PROGRAMS = 256
"""Programs of one rank beyond which more do not help."""
WARPS = 8
ROW_BLOCK = 2048
"""32-bit words of a row that a program moves at once."""
TILE = 2
"""Rows that a program moves at once."""
SCAN = 4096
"""Lanes that a program looks through at once."""
SUM_BYTES = 16 * 32 * WARPS
COPY_WORKERS = 132 * 4
REGISTERS = 64
"""Of a thread: what ``WAITING_PROGRAMS`` counts on."""


class PulledExchange:
    """One rank of an exchange of few tokens.

    Args:
        exchange: whose memory, addresses and counters are used.
        sharing: ranks whose launches run on this GPU at once, this one included; equal on all ranks.
        stamps: int64 [2, STAMPED_STEPS, programs, 2] for the clock of each program (dispatch, combine), or
            None; to measure.

    Attributes:
        result_slab: int32 [L * M of the largest step, words of a result]; results that lie here need no copy.
    """

    def __init__(self, exchange: Exchange, sharing: int = 1, stamps: torch.Tensor | None = None) -> None:
        self.exchange, self._stamps = exchange, stamps
        shape = exchange.shape
        self._shape = shape
        budget = max(1, WAITING_PROGRAMS // sharing)
        self._publishers = min(PUBLISHERS, power_of_two(budget + 1) // 2)
        local = len(exchange.held)
        self._groups = min(local, max(1, budget))
        self._workers = max(1, min(budget, TAKING_PROGRAMS) // self._groups)
        self._workers = max(self._workers, -(-self._publishers // self._groups))
        self._summing = min(budget, TAKING_PROGRAMS)
        self._lists = torch.empty(shape.few_rows, dtype=torch.int32, device=exchange.device)
        self.result_slab = exchange.section("result_slab", torch.int32).view(
            shape.few_rows, shape.result_bytes // 4
        )

    @property
    def private_bytes(self) -> int:
        """Bytes that were allocated here."""
        return self._lists.nbytes

    @property
    def programs(self) -> tuple[int, int]:
        """Of a dispatch, and the most of a combine."""
        return self._groups * self._workers, self._summing

    def dispatch(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slab_rows: int,
        *,
        publishes: bool = True,
        takes: bool = True,
    ) -> Arrived:
        """x [n, h] as ``Exchange.send_rows`` takes it, ids int64 and weights float32 [n, k] contiguous.

        slab_rows: M. publishes, takes: halves of it, for all ranks in one thread.
        """
        exchange, shape = self.exchange, self._shape
        tokens, local = x.shape[0], len(exchange.held)
        words = x.view(torch.int32) if tokens else exchange.rows
        quads = shape.row_bytes // 16
        groups = 0 if scales is None else scales.shape[1]
        counts, psum = torch.empty(2, local, dtype=torch.int32, device=exchange.device)
        pulled_kernels.dispatch_kernel[(self._groups, self._workers)](
            words, exchange.weights if scales is None else scales, ids, weights, counts, psum, self._lists,
            exchange.peers, exchange.state, exchange.notice, self._stamped(0),
            exchange.rank, shape.ranks, tokens, exchange.held.start, local, shape.num_experts, slab_rows,
            words.stride(0) // 4, quads, 0 if scales is None else scales.stride(0), groups, exchange.limit,
            lanes=shape.top_k, slots=power_of_two(shape.top_k), span=shape.few_lanes,
            publishers=self._publishers, scan=min(SCAN, power_of_two(shape.ranks * shape.few_lanes)),
            tile=TILE, block=_block(quads), group_block=power_of_two(groups) if groups else 0,
            width=exchange.width, publishes=publishes, takes=takes, clocked=exchange.clocked,
            stamped=self._stamps is not None, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        return Arrived(counts, psum, many=False)

    def combine(
        self,
        results: torch.Tensor,
        ids: torch.Tensor,
        arrived: Arrived,
        slab_rows: int,
        out_dtype: torch.dtype | None = None,
        *,
        signals: bool = True,
        takes: bool = True,
    ) -> torch.Tensor:
        """results [L * M, h], contiguous -> [n, h]: sums of the lanes of ids int64 [n, k], contiguous.

        ``out_dtype``: None for that of the results. Results elsewhere than in ``result_slab`` are copied
        there by a launch of its own.
        """
        exchange, shape = self.exchange, self._shape
        if signals and results.data_ptr() != self.result_slab.data_ptr():
            quads = shape.result_bytes // 16
            local = len(exchange.held)
            pulled_kernels.copy_results_kernel[(local, max(1, COPY_WORKERS // local))](
                results.view(torch.int32), self.result_slab, arrived.counts, slab_rows, quads,
                tile=TILE, block=_block(quads), num_warps=WARPS,
            )  # fmt: skip
        tokens, hidden = ids.shape[0], results.shape[1]
        out = torch.empty(tokens, hidden, dtype=out_dtype or results.dtype, device=results.device)
        block = min(SUM_BYTES // results.itemsize, power_of_two(hidden))
        items = tokens * -(-hidden // block)
        pulled_kernels.combine_kernel[(max(1, min(items, self._summing)),)](
            ids, exchange.owners, self.result_slab.view(results.dtype), out, exchange.peers, exchange.state,
            exchange.notice, self._stamped(1), exchange.rank, shape.ranks, tokens, hidden, exchange.limit,
            lanes=shape.top_k, block=block, width=exchange.width, signals=signals, takes=takes,
            clocked=exchange.clocked, stamped=self._stamps is not None, num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        return out

    def settle(self, *, signals: bool = True, waits: bool = True) -> None:
        """Before the next step when a dispatch was given up: all ranks do so, and wait for each other."""
        exchange = self.exchange
        pulled_kernels.settle_kernel[(1,)](
            exchange.peers, exchange.state, exchange.notice, exchange.rank, self._shape.ranks, exchange.limit,
            width=exchange.width, signals=signals, waits=waits, clocked=exchange.clocked, num_warps=1,
        )  # fmt: skip

    def _stamped(self, launch: int) -> torch.Tensor:
        return self.exchange.notice if self._stamps is None else self._stamps[launch]


def _block(quads: int) -> int:
    return min(ROW_BLOCK, max(128, power_of_two(quads * 4)))
