"""Continuous batching for one replica: requests come and go, steps are scheduled, their results taken in.

The engine calls ``schedule``, runs the model on the batch, samples, and calls ``commit``; requests are added
and aborted in between. While a decode step runs, ``schedule_ahead`` may make the next one. What goes into a
step is decided in ``batching``. No torch, no communication.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from interlock.engine.admission import Int32s, prompt_array, refusal
from interlock.engine.admission_policy import AdmissionPolicy
from interlock.engine.admitted import Admitted
from interlock.engine.batch import Batch, SamplingRows, idle_arrays
from interlock.engine.batching import Batching
from interlock.engine.counters import Counters
from interlock.engine.departures import Departures
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
from interlock.kv.store import Geometry, PageStore
from interlock.moe.terms import Phase
from interlock.plan.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from interlock.engine.grammar import GrammarState


class Scheduler:
    """See the module. ``draw_seed`` gives the 64-bit seed of a request that brings none.

    Attributes:
        reception: requests whose prompt another server computes.
        admitted: requests that take part in steps.
        departures: requests that ended and whose pages are still in use.
        batching: what makes the steps.
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
        self.admitted = Admitted(self.pages)
        self.departures = Departures(self.admitted)
        self.on_chunk: Callable[[Request, int], None] | None = None
        self.hands_over = False
        self._draw_seed = draw_seed
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._in_flight: Batch | None = None
        self._ahead: Batch | None = None
        self._last_phase: Phase | None = None
        self._inspected: set[Request] = set()
        self._arrived = False
        self._arrivals = 0
        self._count = Counters()
        self._policy = AdmissionPolicy(
            self.pages,
            self.admitted,
            self.reception,
            chunk_size=self.chunk_size,
            max_model_len=plan.max_model_len,
        )
        self.batching = Batching(
            self.pages, self.admitted, self._waiting, self._policy, self._count, chunk_size=self.chunk_size
        )

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

    def expect(self, message: AddRequest, grammar: GrammarState | None = None) -> Request:
        """A request whose prompt another server computes. It holds nothing, and may be dropped, until
        ``reserve``."""
        return self._new_request(message, grammar)

    def reserve(self, request: Request) -> bool:
        """Take a slot and pages for an expected request; False while there is no room.

        The request is nobody's to schedule, retract or abort until ``arrive`` or ``give_up``.
        """
        if not self.table.free_rows or len(self._waiting):
            return False
        path = self.store.match(request.tokens, request.prompt_len)
        growing = len(self.admitted) + len(self.reception)
        if not self.reception.has_room(request, path, beside=growing):
            return False
        request.queue_seconds = time.monotonic() - request.arrived
        self.reception.enter(request, self.table, path)
        return True

    def arrive(self, request: Request, arrival: Arrival) -> list[TokenDelta]:
        """The keys and values of a reserved request are here, and its first token: it goes on from there."""
        self.reception.arrived(request, arrival)
        self._requests[request.id] = request
        self._count.prompt_tokens += request.prompt_len
        if arrival.token is None:
            self._finish(request)
            return [delta(request, (), finish_reason="length")]
        self.admitted.decode(request)
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
        if not request.holds:
            self.departures.let_go(self._in_flight)

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
        else:
            self.departures.end(request, self._in_flight)
        request.state = State.FINISHED
        return [delta(request, (), finish_reason="abort")]

    def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; returns how many pages of tokens are still in use
        (0: the prefix cache is empty)."""
        self._policy.reconsider()
        return self.store.flush()

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or self._in_flight is not None

    def stats(self) -> SchedulerStats:
        """Counters; see ``Counters.stats``."""
        return self._count.stats(
            self.store,
            replica=self.replica,
            running=len(self.admitted),
            waiting=len(self._waiting),
            receiving=len(self.reception),
        )

    # ---- the next step

    def wanted(self) -> Wanted:
        """What this replica could do next; changes nothing."""
        prefill, decode = self.batching.prefill_bound(), self.admitted.decoding
        alone = Wanted(None, prefill, decode)
        return Wanted(agree([alone], self._last_phase), prefill, decode)

    def schedule(self, phase: Phase | None = None) -> Batch | None:
        """The next step; None when there is nothing to do (in that phase).

        Args:
            phase: the phase that all replicas agreed on; None lets this replica choose alone.

        Raises:
            RuntimeError: the previous batch has not been committed.
        """
        if self._in_flight is not None:
            raise RuntimeError("the previous batch must be committed before the next is scheduled")
        self._policy.next_step()
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
        if batch.sampling.adjusts.any() or self.batching.prefill_bound():
            return None
        ahead = self.batching.decode_after(batch)
        if ahead is None:
            return None
        self._ahead = ahead
        self._policy.next_step()
        self._count.steps_decode += 1
        return ahead

    def idle_step(self, phase: Phase) -> Batch:
        """A step of no tokens, for when other replicas work in ``phase`` and this one cannot."""
        self._last_phase = phase
        arrays = idle_arrays(phase, has_full=self.geometry.has_full, has_window=self.store.window is not None)
        nobody = np.zeros(0, dtype=np.int64)
        return Batch(arrays=arrays, requests=(), slots=nobody, sampling=SamplingRows.of(self.table, nobody))

    def _launch(self, phase: Phase) -> Batch | None:
        batch = self.batching.prefill() if phase is Phase.PREFILL else self.batching.decode()
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
            self.pages.decoded(batch.requests, batch.slots)
            deltas = []
        outcome = Outcome.of(batch, sampled)
        for request, text in outcome.failed:
            refused = text.startswith(NO_TOKEN_ALLOWED)
            deltas.append(delta(request, (), finish_reason="error", error=text, refused=refused))
            self._finish(request, spoilt=True)
        deltas += self._append(outcome)
        self.departures.let_go(self._in_flight)
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
            self.admitted.decode(request)
        return deltas

    def _finish(self, request: Request, *, spoilt: bool = False) -> None:
        self.departures.end(request, self._in_flight, spoilt=spoilt)
        request.state = State.FINISHED
        self._inspected.discard(request)
        del self._requests[request.id]
