"""Continuous batching for one replica: who computes what in the next step, and what its result means.

The engine calls ``schedule``, runs the model on the batch, samples, and calls ``commit``; requests are added
and aborted in between. While a decode step runs, ``schedule_ahead`` may make the next one. No torch, no
communication.

**Why it cannot deadlock.** Requests are totally ordered by rank = (priority, arrival). A request that needs a
page takes a free one, else one that only the prefix cache holds, else one of a request of larger rank, which
is *retracted* (its tokens are kept and computed again later). So nobody can stop the admitted request of
smallest rank, and when nobody is admitted the head of the queue is, whatever it needs. A request that needs
more than the whole pool was refused when it was added; hence the smallest rank always finishes, and by
induction all do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from interlock.engine.admission import Int32s, prompt_array, refusal
from interlock.engine.assemble import decode_batch, prefill_batch
from interlock.engine.batch import Batch, Chunk, Int64s, SamplingRows, idle_arrays
from interlock.engine.counters import Counters
from interlock.engine.inspection import inspected
from interlock.engine.messages import AddRequest, SchedulerStats, TokenDelta
from interlock.engine.outcome import Outcome, StopRules, delta
from interlock.engine.reception import Arrival, Reception
from interlock.engine.request import Request, State
from interlock.engine.sampled import NO_TOKEN_ALLOWED, SampledTokens
from interlock.engine.sequence_pages import SequencePages
from interlock.engine.slots import SlotTable
from interlock.engine.turns import Wanted, agree
from interlock.engine.waiting import WaitingQueue
from interlock.kv.prefix_tree import Node
from interlock.kv.store import Geometry, PageStore
from interlock.moe.terms import Phase
from interlock.plan.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from interlock.engine.grammar import GrammarState

BLOCKED_RETRY_STEPS = 8


class Scheduler:
    """See the module. ``draw_seed`` gives the 64-bit seed of a request that brings none.

    Attributes:
        reception: requests whose prompt another server computes.
        on_chunk: told of each request whose next tokens are computed, and how far, before it may end.
        hands_over: another server continues after the first token, so a request ends with it.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        replica: int = 0,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.replica = replica
        self.geometry = Geometry.of(plan)
        self.store = PageStore(self.geometry, prefix_cache=plan.prefix_cache)
        self.table = SlotTable(plan.max_running_requests, plan.max_model_len, self.geometry)
        self.pages = SequencePages(self.store, self.table)
        self.chunk_size = plan.chunked_prefill_size
        self._max_model_len = plan.max_model_len
        self._vocab_size = plan.card.vocab_size
        self._eos_ids = frozenset(plan.card.eos_token_ids)
        self._rules = StopRules(self.table, plan.card.eos_token_ids)
        self.reception = Reception(self.pages)
        self.on_chunk: Callable[[Request, int], None] | None = None
        self.hands_over = False
        self._draw_seed = draw_seed
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._prefilling: dict[Request, None] = {}
        self._decoding: dict[Request, None] = {}
        self._decode_rows: tuple[tuple[Request, ...], Int64s] | None = None
        self._in_flight: Batch | None = None
        self._ahead: Batch | None = None
        self._departing: dict[Request, bool] = {}
        self._last_phase: Phase | None = None
        self._blocked: tuple[Request, int, int] | None = None
        self._inspected: set[Request] = set()
        self._arrived = False
        self._arrivals = 0
        self._steps = 0
        self._count = Counters()

    # ---- requests come and go

    def add(self, message: AddRequest, *, grammar: GrammarState | None = None) -> list[TokenDelta]:
        """Queue a request. A request that can never run, or whose id is in use, is refused at once with the
        returned delta, whose ``finish_reason`` is "error".

        Args:
            grammar: what the answer must match, at its beginning.
        """
        tokens = prompt_array(message.token_ids)
        refused = self.refusal(message, tokens)
        if refused is not None:
            return [refused]
        request = self._new_request(message, grammar, tokens)
        self._requests[request.id] = request
        if request.inspection is not None:
            self._inspected.add(request)
        self._waiting.push(request)
        return []

    def refusal(self, message: AddRequest, tokens: Int32s | None = None) -> TokenDelta | None:
        """The delta of a request that can never run, or whose id is in use; None when it can be added."""
        if message.request_id in self._requests:
            text = f"a request with the id {message.request_id!r} is still running; ids must be unique"
            return TokenDelta(request_id=message.request_id, finish_reason="error", error=text)
        problem = refusal(
            message,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            geometry=self.geometry,
            tokens=tokens,
        )
        if not problem:
            return None
        return TokenDelta(
            request_id=message.request_id,
            finish_reason="error",
            error=problem,
            refused=True,
            prompt_tokens=len(message.token_ids),
        )

    def _new_request(
        self, message: AddRequest, grammar: GrammarState | None, tokens: Int32s | None = None
    ) -> Request:
        seed = message.sampling.seed
        request = Request(
            message,
            arrival=self._arrivals,
            seed=self._draw_seed() if seed is None else seed,
            eos_ids=self._eos_ids,
            tokens=tokens,
        )
        request.grammar = grammar
        self._arrivals += 1
        return request

    # ---- requests whose prompt is computed elsewhere

    def reserve(self, message: AddRequest, grammar: GrammarState | None = None) -> Request | None:
        """Take a slot and pages for a prompt that another server computes; None while there is no room.

        The request is nobody's to schedule, retract or abort until ``arrive`` or ``give_up``.
        """
        if not self.table.free_rows or len(self._waiting):
            return None
        request = self._new_request(message, grammar)
        path = self.store.match(request.tokens, request.prompt_len)
        growing = len(self._prefilling) + len(self._decoding) + len(self.reception)
        if not self.reception.has_room(request, path, beside=growing):
            return None
        request.queue_seconds = time.monotonic() - request.arrived
        self.reception.enter(request, self.table, path)
        return request

    def arrive(self, request: Request, arrival: Arrival) -> list[TokenDelta]:
        """The keys and values of a reserved request are here, and its first token: it goes on from there."""
        self.reception.arrived(request, arrival)
        self._requests[request.id] = request
        self._count.prompt_tokens += request.prompt_len
        if arrival.token is None:
            self._finish(request)
            return [delta(request, (), finish_reason="length")]
        request.state = State.DECODING
        self._decoding[request] = None
        self._decode_rows = None
        self._arrived = True
        return self._append(arrival.outcome(request))

    def give_up(self, request: Request) -> None:
        """Let go of a reserved request. Nobody may write to its pages any more."""
        slot = request.slot
        self.reception.leave(request)
        self.table.give_row(slot)

    def release_hold(self, request: Request) -> None:
        """One reader of the request's pages is done (``Request.holds``)."""
        request.holds -= 1
        if not request.holds and request in self._departing:
            self._let_go()

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End a request wherever it is. Returns its last delta, or nothing when there is no such request
        (any more). After this no delta of it appears, even if a step with it is in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        self._inspected.discard(request)
        self._count.aborts += 1
        if request.state is State.WAITING:
            self._waiting.forget(request)
        if request.slot >= 0:
            if self._in_flight is None and not request.holds:
                self._leave(request)
            else:
                self._departing[request] = False
        self._forget(request)
        request.state = State.FINISHED
        return [delta(request, (), finish_reason="abort")]

    def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; returns how many pages of tokens are still in use
        (0: the prefix cache is empty)."""
        self._blocked = None
        return self.store.flush()

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._in_flight is not None

    @property
    def last_phase(self) -> Phase | None:
        """Phase of the last step, idle steps included."""
        return self._last_phase

    def stats(self) -> SchedulerStats:
        """Counters; see ``Counters.stats``."""
        running = len(self._prefilling) + len(self._decoding)
        return self._count.stats(
            self.store,
            replica=self.replica,
            running=running,
            waiting=len(self._waiting),
            receiving=len(self.reception),
        )

    # ---- the next step

    def wanted(self) -> Wanted:
        """What this replica could do next; changes nothing."""
        prefill = self._prefill_bound()
        decode = len(self._decoding)
        alone = Wanted(None, prefill, decode)
        return Wanted(agree([alone], self._last_phase), prefill, decode)

    def _prefill_bound(self) -> int:
        total = sum(int(self.table.length[r.slot] - self.table.computed[r.slot]) for r in self._prefilling)
        if total < self.chunk_size and self.table.free_rows and len(self._waiting):
            head = self._waiting.head()
            if head is not None and self._prefix_to_admit(head) is not None:
                total += self._waiting.tokens
        return min(total, self.chunk_size)

    def schedule(self, phase: Phase | None = None) -> Batch | None:
        """The next step; None when there is nothing to do (in that phase).

        Args:
            phase: the phase that all replicas agreed on; None lets this replica choose alone.

        Raises:
            RuntimeError: the previous batch has not been committed.
        """
        if self._in_flight is not None:
            raise RuntimeError("the previous batch must be committed before the next is scheduled")
        self._steps += 1
        if phase is not None:
            self._last_phase = phase
            return self._launch(phase)
        first = self.wanted().phase
        if first is None:
            return None
        other = Phase.DECODE if first is Phase.PREFILL else Phase.PREFILL
        return self._launch(first) or self._launch(other)

    def schedule_ahead(self) -> Batch | None:
        """The decode step after the one in flight, made before that one's tokens are known. Commit in order.

        None where the next step must wait: somebody may start, a row's sampling looks at earlier tokens, or
        pages are short. A request that turns out to have ended takes part in vain; its row is dropped.
        """
        batch = self._in_flight
        if batch is None or self._ahead is not None or batch.chunks or self._inspected or self._arrived:
            return None
        if batch.sampling.adjusts.any() or self._prefill_bound():
            return None
        length = self.table.length[batch.slots]
        goes_on = length + 1 - self.table.prompt_len[batch.slots] < self.table.max_tokens[batch.slots]
        goes_on &= np.fromiter((r.state is State.DECODING for r in batch.requests), np.bool_, len(length))
        rows = np.flatnonzero(goes_on)
        if not len(rows):
            return None
        slots = batch.slots[rows]
        if not self._grow_at_once(slots, length[rows] // self.geometry.page_size):
            return None
        requests = batch.requests if len(rows) == len(length) else tuple(batch.requests[i] for i in rows)
        ahead = decode_batch(self.table, requests, slots, self.geometry.page_size, sources=rows)
        if ahead.sampling.adjusts.any():
            return None
        self._ahead = ahead
        self._steps += 1
        self._count.steps_decode += 1
        return ahead

    def idle_step(self, phase: Phase) -> Batch:
        """A step of no tokens, for when other replicas work in ``phase`` and this one cannot."""
        self._last_phase = phase
        arrays = idle_arrays(phase, has_full=self.geometry.has_full, has_window=self.store.window is not None)
        nobody = np.zeros(0, dtype=np.int64)
        return Batch(arrays=arrays, requests=(), slots=nobody, sampling=SamplingRows.of(self.table, nobody))

    def _launch(self, phase: Phase) -> Batch | None:
        batch = self._schedule_prefill() if phase is Phase.PREFILL else self._schedule_decode()
        self._arrived = self._arrived and phase is Phase.PREFILL
        if batch is not None:
            if self._inspected:
                batch = inspected(batch)
            self._in_flight = batch
            self._last_phase = phase
            if phase is Phase.PREFILL:
                self._count.steps_prefill += 1
            else:
                self._count.steps_decode += 1
        return batch

    def _schedule_decode(self) -> Batch | None:
        requests, slots = self._decode_order()
        if not requests:
            return None
        page = (self.table.length[slots] - 1) // self.geometry.page_size
        if not self._grow_at_once(slots, page):
            growing = page >= self.table.pages[slots]
            self._grow_under_pressure([requests[i] for i in np.flatnonzero(growing)])
            requests, slots = self._decode_order()
            if not requests:
                return None
        return decode_batch(self.table, requests, slots, self.geometry.page_size)

    def _grow_at_once(self, slots: Int64s, page: Int64s) -> bool:
        """Give each slot its page of index ``page`` where it lacks it; False, without a change, when pages
        are short."""
        growing = page >= self.table.pages[slots]
        count = int(np.count_nonzero(growing))
        if count > self.store.available():
            return False
        if count:
            rows, pages = slots[growing], page[growing]
            if self.table.full is not None:
                self.table.full[rows, pages] = self.store.take_full(count)
            if self.table.window is not None:
                self.table.window[rows, pages] = self.store.take_window(count)
            self.table.pages[rows] += 1
        return True

    def _decode_order(self) -> tuple[tuple[Request, ...], Int64s]:
        if self._decode_rows is None:
            requests = tuple(self._decoding)
            self._decode_rows = requests, np.array([r.slot for r in requests], dtype=np.int64)
        return self._decode_rows

    def _grow_under_pressure(self, growing: list[Request]) -> None:
        """One page for each request, smallest rank first, retracting from the other end."""
        for request in sorted(growing, key=lambda r: r.rank):
            if request.state is not State.DECODING:
                continue
            if self._secure_page(request):
                self.pages.grow(request.slot, 1)
            else:
                self._retract(request)

    def _schedule_prefill(self) -> Batch | None:
        budget = self.chunk_size
        chunks: list[Chunk] = []
        admitted = sorted(self._prefilling, key=lambda r: r.rank)
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
        return prefill_batch(self.table, chunks, self.geometry.page_size) if chunks else None

    def _next_chunk(self, request: Request, budget: int) -> Chunk | None:
        """As many of the request's tokens as the budget and the pages allow, its pages taken."""
        table, slot, size = self.table, request.slot, self.geometry.page_size
        start, total = int(table.computed[slot]), int(table.length[slot])
        most = min(total, start + budget)
        if request.inspection is not None and request.inspection.chunk_limit:
            most = min(most, start + request.inspection.chunk_limit)
        held = int(table.pages[slot])
        end = min(most, (held + self.store.available()) * size)
        if end <= start:
            if not self._secure_page(request):
                return None
            end = min(most, (held + self.store.available()) * size)
        extra = self.geometry.pages(end) - held
        if extra > 0:
            self.pages.grow(slot, extra)
        return Chunk(request, start, end, finishes=end == total)

    # ---- admission and retraction

    def _admit_before(self, other: Request | None) -> Request | None:
        """Admit the head of the queue if it ranks before ``other`` and there is room for it."""
        head = self._waiting.head()
        if head is None or not self.table.free_rows or (other is not None and other.rank < head.rank):
            return None
        path = self._prefix_to_admit(head)
        if path is None:
            return None
        self._waiting.pop()
        self._blocked = None
        self._count.prefix_queries += head.num_tokens
        hit = len(path) * self.geometry.page_size
        self._count.prefix_hits += hit
        if head.cached_tokens is None:
            head.cached_tokens = hit
            head.queue_seconds = time.monotonic() - head.arrived
            self._count.prompt_tokens += head.prompt_len
        head.enter(self.table, self.table.take_row())
        self.pages.adopt(head, path)
        head.state = State.PREFILLING
        self._prefilling[head] = None
        return head

    def _prefix_to_admit(self, head: Request) -> list[Node] | None:
        """The cached prefix to admit ``head`` on, or None while there is no room for it.

        Room: its pages fit beside what requests in prefill still need and one page for each decoding
        request that grows; in the window space also a chunk, or a quarter of the space where that is less
        (a chunk is cut to the pages there are). When nobody is admitted it always has room.
        """
        alone = not self._prefilling and not self._decoding and not len(self.reception)
        if not alone and self._still_blocked(head):
            return None
        path = self.store.match(head.tokens, head.reusable_tokens)
        if alone or self._has_room(head, path):
            return path
        self._blocked = (head, self.store.available(), self._steps)
        return None

    def _still_blocked(self, head: Request) -> bool:
        """Whether ``head`` was found too large lately and no pages have come free since."""
        if self._blocked is None:
            return False
        request, available, step = self._blocked
        return (
            request is head
            and self.store.available() <= available
            and self._steps < step + BLOCKED_RETRY_STEPS
        )

    def _has_room(self, head: Request, path: list[Node]) -> bool:
        geometry, store = self.geometry, self.store
        full, window = len(self._decoding), self._growing_windows()
        for request in self._prefilling:
            more_full, more_window = self._outstanding(request)
            full += more_full
            window += more_window
        hit = len(path)
        full += geometry.pages(head.num_tokens) - sum(node.refs > 0 for node in path)
        if full > store.full_available():
            return False
        first = geometry.first_visible(hit * geometry.page_size)
        window += self._window_demand(head) - sum(node.window_refs > 0 for node in path[first:])
        window += min(geometry.pages(min(self.chunk_size, head.num_tokens)), geometry.window_pages // 4)
        return window <= store.window_available()

    def _growing_windows(self) -> int:
        """Decoding requests that will hold more window pages than now; others give one back for each new."""
        if self.geometry.window is None:
            return 0
        _, slots = self._decode_order()
        held = self.table.pages[slots] - self.table.first_window[slots]
        return int(np.count_nonzero(held < self.geometry.window_pages_for(self._max_model_len, 1)))

    def _outstanding(self, request: Request) -> tuple[int, int]:
        """Pages of each space that a request in prefill may still take."""
        held = int(self.table.pages[request.slot])
        window_held = held - int(self.table.first_window[request.slot])
        full = self.geometry.pages(request.num_tokens) - held
        return max(0, full), max(0, self._window_demand(request) - window_held)

    def _window_demand(self, request: Request) -> int:
        """Window pages that the request holds between its steps."""
        return self.geometry.window_pages_for(request.num_tokens, 1)

    def _secure_page(self, request: Request) -> bool:
        """Make one page available in every space, retracting requests that rank after ``request``."""
        while self.store.available() < 1:
            candidates = [r for r in (*self._prefilling, *self._decoding) if not r.holds]
            victim = max(candidates, key=lambda r: r.rank, default=request)
            if victim.rank <= request.rank:
                return False
            self._retract(victim)
        return True

    def _retract(self, request: Request) -> None:
        self._count.retractions += 1
        self._leave(request)
        request.state = State.WAITING
        self._waiting.push(request)

    def _leave(self, request: Request, *, spoilt: bool = False) -> None:
        """Take an admitted request out of the table and let go of its pages."""
        slot = request.slot
        self.pages.release(request, spoilt=spoilt)
        request.leave()
        self.table.give_row(slot)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Take a request out of the sets of admitted ones."""
        self._prefilling.pop(request, None)
        if self._decoding.pop(request, self) is None:
            self._decode_rows = None

    # ---- results of a step

    def commit(self, batch: Batch, sampled: SampledTokens) -> list[TokenDelta]:
        """Take in the results of the batch that is in flight; an idle step changes nothing.

        Raises:
            RuntimeError: another batch is in flight.
        """
        if self._in_flight is None and not batch.arrays.live_tokens:
            return []
        if batch is not self._in_flight:
            raise RuntimeError("only the batch that has been in flight for longest can be committed")
        self._in_flight, self._ahead = self._ahead, None
        for scores, entries in zip(batch.prompt_scores, sampled.prompt_logprobs, strict=True):
            assert scores.request.prompt_logprobs is not None
            scores.request.prompt_logprobs.extend(entries)
        if batch.chunks:
            deltas = self._commit_chunks(batch)
        else:
            self._commit_decode(batch.slots, batch.requests)
            deltas = []
        outcome = Outcome.of(batch, sampled)
        for request, text in outcome.failed:
            refused = text.startswith(NO_TOKEN_ALLOWED)
            deltas.append(delta(request, (), finish_reason="error", error=text, refused=refused))
            self._finish(request, spoilt=True)
        deltas += self._append(outcome)
        self._let_go()
        return deltas

    def _append(self, outcome: Outcome) -> list[TokenDelta]:
        """Take in new tokens: append them, end those requests that end with them."""
        deltas = []
        self._count.generated_tokens += len(outcome.requests)
        for request, token_id in zip(outcome.requests, outcome.token_ids.tolist(), strict=True):
            if request.grammar is not None:
                request.grammar.accept(token_id)
        for request, message in self._rules.apply(outcome):
            deltas.append(message)
            if message.finish_reason is not None or self.hands_over:
                self._finish(request)
        return deltas

    def _let_go(self) -> None:
        """Take out the requests that ended, but for those that the step in flight still works on."""
        busy = frozenset(self._in_flight.requests) if self._in_flight and self._departing else frozenset()
        for request in [r for r in self._departing if not r.holds and r not in busy]:
            self._leave(request, spoilt=self._departing.pop(request))

    def _commit_chunks(self, batch: Batch) -> list[TokenDelta]:
        deltas = []
        for chunk in batch.chunks:
            request = chunk.request
            if request.state is State.FINISHED:
                continue
            self.table.computed[request.slot] = chunk.end
            if request.inspection is not None:
                request.chunk_ends.append(chunk.end)
            self.pages.publish(request)
            if self.on_chunk is not None:
                self.on_chunk(request, chunk.end)
            self.pages.drop_behind_window(request)
            if not chunk.finishes:
                continue
            if request.params.max_tokens == 0:
                deltas.append(delta(request, (), finish_reason="length"))
                self._finish(request)
                continue
            del self._prefilling[request]
            request.state = State.DECODING
            self._decoding[request] = None
            self._decode_rows = None
        return deltas

    def _commit_decode(self, slots: Int64s, requests: tuple[Request, ...]) -> None:
        table = self.table
        computed = table.length[slots]
        table.computed[slots] = computed
        if self.store.tree is not None:
            for index in np.flatnonzero(computed % self.geometry.page_size == 0).tolist():
                if requests[index].state is State.DECODING:
                    self.pages.publish(requests[index])
        if self.geometry.window is not None:
            first = np.maximum(0, computed - self.geometry.window + 1) // self.geometry.page_size
            for index in np.flatnonzero(first > table.first_window[slots]).tolist():
                if requests[index].state is State.DECODING:
                    self.pages.drop_behind_window(requests[index])

    def _finish(self, request: Request, *, spoilt: bool = False) -> None:
        if self._in_flight is None and not request.holds:
            self._leave(request, spoilt=spoilt)
        else:
            self._forget(request)
            self._departing[request] = spoilt
        request.state = State.FINISHED
        self._inspected.discard(request)
        del self._requests[request.id]
