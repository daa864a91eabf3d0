"""What goes into the next step of one replica: chunks of prompts, or one token of each decoding request.

**Why it cannot deadlock.** Requests are totally ordered by rank = (priority, arrival). A request that needs a
page takes a free one, else one that only the prefix cache holds, else one of a request of larger rank, which
is *retracted* (its tokens are kept and computed again later). So nobody can stop the admitted request of
smallest rank, and when nobody is admitted the head of the queue is, whatever it needs. A request that needs
more than the whole pool was refused when it was added; hence the smallest rank always finishes, and by
induction all do.
"""

from __future__ import annotations

import time

import numpy as np

from interlock.engine.admission_policy import AdmissionPolicy
from interlock.engine.admitted import Admitted
from interlock.engine.assemble import decode_batch, prefill_batch
from interlock.engine.batch import Batch, Chunk
from interlock.engine.counters import Counters
from interlock.engine.request import Request, State
from interlock.engine.sequence_pages import SequencePages
from interlock.engine.waiting import WaitingQueue


class Batching:
    """Makes batches of admitted requests, admits those that wait, and retracts those that are in the way.

    Args:
        chunk_size: most tokens of a prefill step.
    """

    def __init__(
        self,
        pages: SequencePages,
        admitted: Admitted,
        waiting: WaitingQueue,
        policy: AdmissionPolicy,
        count: Counters,
        *,
        chunk_size: int,
    ) -> None:
        self._pages = pages
        self._table = pages.table
        self._store = pages.store
        self._geometry = pages.geometry
        self._admitted = admitted
        self._waiting = waiting
        self._policy = policy
        self._count = count
        self._chunk_size = chunk_size

    def prefill_bound(self) -> int:
        """Upper bound of the tokens of a prefill step now; changes nothing."""
        total = self._admitted.uncomputed_tokens
        if total < self._chunk_size and self._table.free_rows and len(self._waiting):
            head = self._waiting.head()
            if head is not None and self._policy.prefix_to_admit(head) is not None:
                total += self._waiting.tokens
        return min(total, self._chunk_size)

    # ---- decode

    def decode(self) -> Batch | None:
        """One token of each decoding request; None when there is none."""
        requests, slots = self._admitted.decode_rows()
        if not requests:
            return None
        page = (self._table.length[slots] - 1) // self._geometry.page_size
        if not self._pages.grow_to(slots, page):
            growing = page >= self._table.pages[slots]
            self._grow_under_pressure([requests[i] for i in np.flatnonzero(growing)])
            requests, slots = self._admitted.decode_rows()
            if not requests:
                return None
        return decode_batch(self._table, requests, slots, self._geometry.page_size)

    def decode_after(self, batch: Batch) -> Batch | None:
        """The decode step after ``batch``, whose tokens are not known; None where it depends on them or pages
        are short."""
        table = self._table
        length = table.length[batch.slots]
        goes_on = length + 1 - table.prompt_len[batch.slots] < table.max_tokens[batch.slots]
        goes_on &= np.fromiter((r.state is State.DECODING for r in batch.requests), np.bool_, len(length))
        rows = np.flatnonzero(goes_on)
        if not len(rows):
            return None
        slots = batch.slots[rows]
        if not self._pages.grow_to(slots, length[rows] // self._geometry.page_size):
            return None
        requests = batch.requests if len(rows) == len(length) else tuple(batch.requests[i] for i in rows)
        ahead = decode_batch(table, requests, slots, self._geometry.page_size, sources=rows)
        return None if ahead.sampling.adjusts.any() else ahead

    def _grow_under_pressure(self, growing: list[Request]) -> None:
        """One page for each request, smallest rank first, retracting from the other end."""
        for request in sorted(growing, key=lambda r: r.rank):
            if request.state is not State.DECODING:
                continue
            if self._secure_page(request):
                self._pages.grow(request.slot, 1)
            else:
                self.retract(request)

    # ---- prefill

    def prefill(self) -> Batch | None:
        """Chunks of requests in prefill and of newly admitted ones, by rank; None when there are none."""
        budget = self._chunk_size
        chunks: list[Chunk] = []
        admitted = sorted(self._admitted.prefilling, key=lambda r: r.rank)
        admitted.reverse()
        retractions = self._count.retractions
        admitting = True
        while budget > 0:
            admitting = admitting and self._count.retractions == retractions
            request = self._admit_before(admitted[-1] if admitted else None) if admitting else None
            if request is None:
                if not admitted:
                    break
                admitting = admitting and self._waiting.head() is not None
                request = admitted.pop()
                if request.state is not State.PREFILLING:
                    continue
            chunk = self._next_chunk(request, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
        return prefill_batch(self._table, chunks, self._geometry.page_size) if chunks else None

    def _admit_before(self, other: Request | None) -> Request | None:
        """Admit the head of the queue if it ranks before ``other`` and there is room for it."""
        head = self._waiting.head()
        if head is None or not self._table.free_rows or (other is not None and other.rank < head.rank):
            return None
        path = self._policy.prefix_to_admit(head)
        if path is None:
            return None
        self._waiting.pop()
        self._policy.reconsider()
        self._count.prefix_queries += head.num_tokens
        hit = len(path) * self._geometry.page_size
        self._count.prefix_hits += hit
        if head.cached_tokens is None:
            head.cached_tokens = hit
            head.queue_seconds = time.monotonic() - head.arrived
            self._count.prompt_tokens += head.prompt_len
        self._admitted.enter(head, path)
        return head

    def _next_chunk(self, request: Request, budget: int) -> Chunk | None:
        """As many of the request's tokens as the budget and the pages allow, its pages taken."""
        table, slot, size = self._table, request.slot, self._geometry.page_size
        start, total = int(table.computed[slot]), int(table.length[slot])
        most = min(total, start + budget)
        if request.inspection is not None and request.inspection.chunk_limit:
            most = min(most, start + request.inspection.chunk_limit)
        held = int(table.pages[slot])
        end = min(most, (held + self._store.available()) * size)
        if end <= start:
            if not self._secure_page(request):
                return None
            end = min(most, (held + self._store.available()) * size)
        extra = self._geometry.pages(end) - held
        if extra > 0:
            self._pages.grow(slot, extra)
        return Chunk(request, start, end, finishes=end == total)

    # ---- retraction

    def _secure_page(self, request: Request) -> bool:
        """Make one page available in every space, retracting requests that rank after ``request``."""
        while self._store.available() < 1:
            candidates = [r for r in self._admitted if not r.holds]
            victim = max(candidates, key=lambda r: r.rank, default=request)
            if victim.rank <= request.rank:
                return False
            self.retract(victim)
        return True

    def retract(self, request: Request) -> None:
        """Take an admitted request's pages and let it wait again, with the tokens that it has."""
        self._count.retractions += 1
        self._admitted.leave(request)
        request.state = State.WAITING
        self._waiting.push(request)
