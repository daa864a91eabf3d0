"""The two launches of a step with few tokens: see ``pulled_kernels``. Beside ``Exchange``, on its memory."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch

from interlock.moe.a2a.symmetric import pulled_kernels
from interlock.moe.a2a.symmetric.exchange import Arrived, Exchange
from interlock.moe.a2a.symmetric.shape import PUBLISHERS, power_of_two

PROGRAMS_AN_SM = 4
"""Of 8 warps and ``REGISTERS`` that one multiprocessor holds at once: its 65,536 registers."""
REGISTERS = 64
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
RESULTS, RELEASED = (2, 3), (3, 7)
"""Stages, with the codes of notices, at which ranks meet."""


def waiting_programs(multiprocessors: int, ranks_per_gpu: int) -> int:
    """Programs of one rank's launch that may wait for peers at once.

    A program that waits keeps its place on the GPU. Where a peer runs on the same GPU it must find room: only
    one program of each rank waits there, so that no number of ranks and jobs that a GPU takes can fill it.
    """
    return 1 if ranks_per_gpu > 1 else multiprocessors * PROGRAMS_AN_SM


class PulledExchange:
    """One rank of an exchange of few tokens.

    Args:
        exchange: whose memory, addresses and counters are used.
        waiting: programs of a launch that may wait at once, see ``waiting_programs``. Where they are fewer
            than publish, both launches are cut in two with a launch of one program between.
        stamps: int64 [2, STAMPED_STEPS, programs, 2] for the clock of each program (dispatch, combine), or
            None; to measure.

    Attributes:
        result_slab: int32 [L * M of the largest step, words of a result]; results that lie here need no copy.
    """

    def __init__(self, exchange: Exchange, waiting: int, stamps: torch.Tensor | None = None) -> None:
        self.exchange, self._stamps = exchange, stamps
        shape = exchange.shape
        self._shape = shape
        self._split = waiting < PUBLISHERS
        most = TAKING_PROGRAMS if self._split else min(waiting, TAKING_PROGRAMS)
        self._groups = min(len(exchange.held), most)
        if most // self._groups * self._groups < PUBLISHERS:
            self._groups = power_of_two(self._groups + 1) // 2
        self._workers = most // self._groups
        self._summing = most
        self._lists = torch.empty(shape.few_rows, dtype=torch.int32, device=exchange.device)
        self.result_slab = exchange.section("result_slab", torch.int32).view(
            shape.few_rows, shape.result_bytes // 4
        )

    @property
    def private_bytes(self) -> int:
        """Bytes that were allocated here."""
        return self._lists.nbytes

    def programs(self, results: tuple[int, int], itemsize: int) -> tuple[int, int]:
        """Of a dispatch, and of the combine of ``results`` (tokens, hidden) of ``itemsize`` bytes."""
        tokens, hidden = results
        items = tokens * -(-hidden // _sum_block(hidden, itemsize))
        return self._groups * self._workers, max(1, min(items, self._summing))

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
        if self._split and publishes and takes:
            self.dispatch(x, scales, ids, weights, slab_rows, takes=False)
            self._await_routes()
            return self.dispatch(x, scales, ids, weights, slab_rows, publishes=False)
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
            publishers=PUBLISHERS, scan=min(SCAN, power_of_two(shape.ranks * shape.few_lanes)),
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
        if self._split and signals and takes:
            self._meet(RESULTS, signals=True, waits=True)
            signals = False
        tokens, hidden = ids.shape[0], results.shape[1]
        out = torch.empty(tokens, hidden, dtype=out_dtype or results.dtype, device=results.device)
        pulled_kernels.combine_kernel[(self.programs((tokens, hidden), results.itemsize)[1],)](
            ids, exchange.owners, self.result_slab.view(results.dtype), out, exchange.peers, exchange.state,
            exchange.notice, self._stamped(1), exchange.rank, shape.ranks, tokens, hidden, exchange.limit,
            lanes=shape.top_k, block=_sum_block(hidden, results.itemsize), width=exchange.width,
            signals=signals, takes=takes, clocked=exchange.clocked, stamped=self._stamps is not None,
            num_warps=WARPS, maxnreg=REGISTERS,
        )  # fmt: skip
        return out

    def settle(self, *, signals: bool = True, waits: bool = True) -> None:
        """Before the next step when a dispatch was given up: all ranks do so, and wait for each other."""
        self._meet(RELEASED, signals, waits)

    def _meet(self, stage: tuple[int, int], signals: bool, waits: bool) -> None:
        exchange = self.exchange
        pulled_kernels.meet_kernel[(1,)](
            exchange.peers, exchange.state, exchange.notice, exchange.rank, self._shape.ranks, exchange.limit,
            stage=stage[0], code=stage[1], width=exchange.width, signals=signals, waits=waits,
            clocked=exchange.clocked, num_warps=1,
        )  # fmt: skip

    def _await_routes(self) -> None:
        exchange = self.exchange
        pulled_kernels.await_routes_kernel[(1,)](
            exchange.peers, exchange.state, exchange.notice, exchange.rank, self._shape.ranks, exchange.limit,
            publishers=PUBLISHERS, width=exchange.width, clocked=exchange.clocked, num_warps=4,
        )  # fmt: skip

    def _stamped(self, launch: int) -> torch.Tensor:
        return self.exchange.notice if self._stamps is None else self._stamps[launch]


def _block(quads: int) -> int:
    return min(ROW_BLOCK, max(128, power_of_two(quads * 4)))


def _sum_block(hidden: int, itemsize: int) -> int:
    """Elements that a program adds at once: 16 bytes of each lane a thread."""
    return min(SUM_BYTES // itemsize, power_of_two(hidden))
