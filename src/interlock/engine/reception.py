"""Requests whose prompt another server computes: their slot and pages until the keys and values are here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from interlock.engine.messages import TokenLogprob
from interlock.engine.outcome import Outcome
from interlock.engine.request import UINT64, Request, State
from interlock.engine.sequence_pages import SequencePages
from interlock.engine.slots import SlotTable
from interlock.kv.prefix_tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What comes with the keys and values of a prompt.

    Attributes:
        token: the first generated token, None where none was wanted (max_tokens 0).
        prompt_logprobs: one entry for each prompt token where they were wanted.
        seed: of the request's draws; the position of the next one follows from its length.
        cached_tokens: of the prompt, that the other server did not compute either.
    """

    token: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    seed: int = 0
    cached_tokens: int = 0

    def outcome(self, request: Request) -> Outcome:
        """The first token as the result of a step of one row."""
        return Outcome(
            requests=(request,),
            slots=np.array([request.slot], dtype=np.int64),
            token_ids=np.array([self.token], dtype=np.int64),
            rows=np.zeros(1, dtype=np.int64),
            logprobs={} if self.logprob is None else {0: self.logprob},
            failed=(),
        )


class Reception:
    """Requests that wait for keys and values. They are in the slot table, but in no step."""

    def __init__(self, pages: SequencePages) -> None:
        self._pages = pages
        self._geometry = pages.geometry
        self._waiting: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._waiting))

    def has_room(self, request: Request, path: list[Node], *, beside: int) -> bool:
        """Whether the prompt's pages fit beside one more page for each of ``beside`` running requests."""
        geometry, store = self._geometry, self._pages.store
        total, hit = geometry.pages(request.prompt_len), len(path)
        full = total - sum(node.refs > 0 for node in path) + beside
        first = geometry.first_visible(request.prompt_len)
        kept = path[max(first, geometry.first_visible(hit * geometry.page_size)) :]
        window = total - max(first, hit) + sum(node.window_refs == 0 for node in kept) + beside
        return full <= store.full_available() and window <= store.window_available()

    def enter(self, request: Request, table: SlotTable, path: list[Node]) -> None:
        """Give the request a slot and pages for its whole prompt, on the cached prefix ``path``."""
        geometry, pages = self._geometry, self._pages
        first = geometry.first_visible(request.prompt_len)
        request.enter(table, table.take_row())
        pages.adopt(request, path)
        pages.drop_before(request, min(first, len(path)))
        pages.reserve(request.slot, geometry.pages(request.prompt_len) - len(path), first)
        request.state = State.RECEIVING
        self._waiting[request] = None

    def arrived(self, request: Request, arrival: Arrival) -> None:
        """The prompt is in the cache; what was found out about it becomes the request's."""
        table, slot = self._pages.table, request.slot
        del self._waiting[request]
        request.seed = arrival.seed & UINT64
        table.seed[slot] = request.seed
        request.cached_tokens = arrival.cached_tokens
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = list(arrival.prompt_logprobs)
        table.computed[slot] = request.prompt_len
        self._pages.publish(request)
        self._pages.drop_behind_window(request)

    def leave(self, request: Request) -> None:
        """Let go of everything but the row of the table."""
        del self._waiting[request]
        request.state = State.FINISHED
        self._pages.release(request)
        request.leave()
