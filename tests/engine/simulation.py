"""A model without weights, for scheduler tests: it stores token ids where a model stores keys and values.

Its next token is a checksum of the whole history, so a token that is lost, doubled, misplaced or read from
the wrong page changes everything after it. Every key that a query may see is read back through the page
tables and compared with the request's own tokens.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from interlock.engine.batch import Batch, StepArrays, decode_arrays, encode_arrays
from interlock.engine.messages import AddRequest, SamplingParams, TokenDelta, TokenLogprob
from interlock.engine.request import Request
from interlock.engine.sampled import SampledTokens
from interlock.engine.scheduler import Scheduler
from interlock.kv.prefix_tree import NO_PAGE
from interlock.moe.terms import Phase
from interlock.plan.card import AttentionCard, LayerCard, ModelCard
from interlock.plan.launch_plan import LaunchPlan
from tests.plans import make_plan

VOCAB = 97
EOS = 96


def make_card(windows: Sequence[int | None], *, eos: tuple[int, ...] = (EOS,)) -> ModelCard:
    """A card with one layer for each window (None: full attention)."""
    layers = tuple(
        LayerCard(
            attention=AttentionCard(
                num_heads=1,
                num_kv_heads=1,
                head_dim=4,
                v_head_dim=4,
                rope_theta=1e4,
                rotary_dim=4,
                window=window,
            ),
            is_moe=False,
        )
        for window in windows
    )
    return ModelCard(
        family="mimo_v2",
        architecture="fake",
        vocab_size=VOCAB,
        hidden_size=4,
        intermediate_size=4,
        layers=layers,
        experts=None,
        norm_eps=1e-5,
        max_position=1 << 16,
        tie_word_embeddings=False,
        dtype="float32",
        weight_format="float32",
        eos_token_ids=eos,
    )


def sim_plan(windows: Sequence[int | None] = (None,), **overrides: Any) -> LaunchPlan:
    fields: dict[str, Any] = {
        "max_model_len": 128,
        "max_running_requests": 8,
        "chunked_prefill_size": 32,
        "page_size": 4,
        "full_pages": 64,
        "window_pages": 64,
    }
    return make_plan(make_card(windows), **(fields | overrides))


LONG = {"ignore_eos": True}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * i + 3 * i + salt) % (VOCAB - 1) for i in range(length)]


def next_token(history: Sequence[int] | np.ndarray) -> int:
    return zlib.crc32(np.asarray(history, dtype=np.int32).tobytes()) % VOCAB


def expected_output(prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str]:
    """What a server must generate, computed without any server."""
    tokens = list(prompt)
    output: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while len(output) < params.max_tokens:
        token = next_token(tokens)
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= params.min_tokens:
            return output, "stop"
    return output, "length"


def prompt_score(history: Sequence[int] | np.ndarray, target: int) -> TokenLogprob:
    return TokenLogprob(int(target), -float(next_token(history)))


class FakeModel:
    """Two page spaces of (token, position), and a forward that checks all it reads."""

    def __init__(self, scheduler: Scheduler) -> None:
        geometry = scheduler.geometry
        self.page_size = geometry.page_size
        self.window = geometry.window
        self.full = np.full((geometry.full_pages * self.page_size, 2), -7, dtype=np.int64)
        self.windowed = np.full((geometry.window_pages * self.page_size, 2), -7, dtype=np.int64)
        self.scheduler = scheduler

    def forward(self, batch: Batch, after: SampledTokens | None = None) -> SampledTokens:
        """``after``: the results of the step before, for a batch that was scheduled ahead of them."""
        arrays = decode_arrays(encode_arrays(batch.arrays))
        if batch.sources is not None:
            assert after is not None
            arrays = replace(arrays, token_ids=after.token_ids[batch.sources])
        owners = [c.request for c in batch.chunks] if batch.chunks else list(batch.requests)
        self._check_shapes(arrays, len(owners))
        self._write(self.full, arrays.full_slots, arrays, self._published("full"))
        self._write(self.windowed, arrays.window_slots, arrays, self._published("window"))
        for index, request in enumerate(owners):
            self._check_sequence(arrays, index, request)
        tokens = [
            self._next(arrays, owners, *pair) for pair in zip(arrays.sample_rows, batch.requests, strict=True)
        ]
        return SampledTokens(
            token_ids=np.array(tokens, dtype=np.int64), prompt_logprobs=self._scores(batch, arrays)
        )

    def _next(self, arrays: StepArrays, owners: list[Request], row: int, request: Request) -> int:
        """What a model would say at this row of the step: it knows the tokens up to the row's position."""
        sequence = int(np.searchsorted(arrays.query_start, row, side="right")) - 1
        assert owners[sequence] is request
        return next_token(request.tokens[: int(arrays.positions[row]) + 1])

    def _published(self, space: str) -> set[int]:
        tree = self.scheduler.store.tree
        return set() if tree is None else {getattr(node, space) for node in tree.walk()} - {NO_PAGE}

    def _check_shapes(self, arrays: StepArrays, sequences: int) -> None:
        total = len(arrays.token_ids)
        assert arrays.live_tokens == total == len(arrays.positions) == arrays.query_start[-1]
        assert arrays.query_start[0] == 0
        assert len(arrays.kv_len) == sequences == len(arrays.query_start) - 1
        assert (np.diff(arrays.query_start) > 0).all()
        if arrays.phase is Phase.DECODE:
            assert (np.diff(arrays.query_start) == 1).all()

    def _write(
        self, cache: np.ndarray, slots: np.ndarray | None, arrays: StepArrays, published: set[int]
    ) -> None:
        if slots is None:
            return
        assert (slots >= 0).all()
        assert len(np.unique(slots)) == len(slots), "two tokens of a step share a slot"
        written = set((slots // self.page_size).tolist())
        assert not written & published, "a page that others may read is written"
        cache[slots, 0] = arrays.token_ids
        cache[slots, 1] = arrays.positions

    def _check_sequence(self, arrays: StepArrays, index: int, request: Request) -> None:
        end = int(arrays.kv_len[index])
        count = int(arrays.query_start[index + 1] - arrays.query_start[index])
        truth = request.tokens[:end].astype(np.int64)
        first_query = end - count
        assert arrays.positions[arrays.query_start[index]] == first_query
        if arrays.full_table is not None:
            self._check_keys(self.full, arrays.full_table[index], 0, end, truth)
        if arrays.window_table is not None:
            assert self.window is not None
            first = max(0, first_query - self.window + 1)
            self._check_keys(self.windowed, arrays.window_table[index], first, end, truth)

    def _check_keys(
        self, cache: np.ndarray, table: np.ndarray, first: int, end: int, truth: np.ndarray
    ) -> None:
        positions = np.arange(first, end)
        pages = table[positions // self.page_size]
        assert (pages >= 0).all(), "a key that a query may see has no page"
        found = cache[pages.astype(np.int64) * self.page_size + positions % self.page_size]
        assert (found[:, 1] == positions).all()
        assert (found[:, 0] == truth[first:end]).all()

    def _scores(self, batch: Batch, arrays: StepArrays) -> tuple[tuple[TokenLogprob, ...], ...]:
        rows = iter(arrays.prompt_rows.tolist())
        result = []
        for scores in batch.prompt_scores:
            entries = []
            for target in scores.targets.tolist():
                position = int(arrays.positions[next(rows)])
                assert scores.request.tokens[position + 1] == target
                entries.append(prompt_score(scores.request.tokens[: position + 1], target))
            result.append(tuple(entries))
        assert next(rows, None) is None
        return tuple(result)


def check_pages(scheduler: Scheduler) -> None:
    """free + cached + owned == total in each space, no page in two hands, all reference counts exact."""
    table, store, tree = scheduler.table, scheduler.store, scheduler.store.tree
    admitted = [*scheduler.admitted, *scheduler.departures, *scheduler.reception]
    nodes = [] if tree is None else list(tree.walk())
    refs: Counter[Any] = Counter()
    window_refs: Counter[Any] = Counter()
    owned: dict[str, list[int]] = {"full": [], "window": []}
    assert table.free_rows + len(admitted) == table.rows
    for request in admitted:
        slot, path = request.slot, request.path
        pages, first = int(table.pages[slot]), int(table.first_window[slot])
        refs.update(path)
        if table.full is not None:
            assert table.full[slot, : len(path)].tolist() == [node.full for node in path]
            owned["full"] += table.full[slot, len(path) : pages].tolist()
            assert (table.full[slot, pages:] == NO_PAGE).all()
        if table.window is not None:
            window_refs.update(path[first:])
            assert (table.window[slot, :first] == NO_PAGE).all()
            assert table.window[slot, first : len(path)].tolist() == [n.window for n in path[first:]]
            owned["window"] += table.window[slot, max(first, len(path)) : pages].tolist()
            assert (table.window[slot, pages:] == NO_PAGE).all()
    for node in nodes:
        assert node.refs == refs[node]
        assert node.window_refs == window_refs[node]
        assert node.full != NO_PAGE or node.window != NO_PAGE or node.refs or node.children
    for name, allocator in (("full", store.full), ("window", store.window)):
        if allocator is None:
            continue
        cached = [getattr(node, name) for node in nodes if getattr(node, name) != NO_PAGE]
        everyone = [*allocator.free_pages(), *cached, *owned[name]]
        assert len(everyone) == allocator.total, f"{name}: free + cached + owned != total"
        assert set(everyone) == set(range(allocator.total)), f"{name}: a page is in two hands"
    if tree is not None:
        assert tree.nodes == len(nodes)
        assert tree.full_pages == sum(node.full != NO_PAGE for node in nodes)
        assert tree.full_idle == sum(node.full != NO_PAGE and not node.refs for node in nodes)
        assert tree.window_pages == sum(node.window != NO_PAGE for node in nodes)
        assert tree.window_idle == sum(node.window != NO_PAGE and not node.window_refs for node in nodes)


@dataclass
class Stream:
    """What a client has received for one request."""

    message: AddRequest
    tokens: list[int] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    finish: str | None = None

    @property
    def last(self) -> TokenDelta:
        return self.deltas[-1]


class Simulation:
    """A scheduler, the fake model, and the clients' view of every request."""

    def __init__(self, plan: LaunchPlan, *, checked: bool = True) -> None:
        self.scheduler = Scheduler(plan)
        self.model = FakeModel(self.scheduler)
        self.streams: dict[str, Stream] = {}
        self.checked = checked
        self.phases: list[Phase] = []
        self.ahead_steps = 0

    def add(self, prompt: Sequence[int], name: str | None = None, *, priority: int = 0, **params: Any) -> str:
        name = f"r{len(self.streams)}" if name is None else name
        message = AddRequest(
            request_id=name,
            token_ids=tuple(prompt),
            sampling=SamplingParams(**({"temperature": 0.0} | params)),
            priority=priority,
        )
        self.streams[name] = Stream(message)
        self.receive(self.scheduler.add(message))
        return name

    def abort(self, name: str) -> None:
        self.receive(self.scheduler.abort(name))

    def receive(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self.streams[delta.request_id]
            assert stream.finish is None, "a delta after the last"
            stream.deltas.append(delta)
            stream.tokens += delta.token_ids
            stream.finish = delta.finish_reason

    def step(self) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self.phases.append(batch.phase)
        if self.checked:
            check_pages(self.scheduler)
        self.receive(self.scheduler.commit(batch, self.model.forward(batch)))
        if self.checked:
            check_pages(self.scheduler)
        return batch

    def run(self, limit: int = 100_000) -> int:
        """Step until nothing is left; fails if that takes more than ``limit`` steps or nobody can move."""
        steps = 0
        while self.scheduler.has_work:
            assert self.step() is not None, "there is work and nobody can move"
            steps += 1
            assert steps < limit, "the workload does not finish"
        return steps

    def verify(self, name: str) -> None:
        """The client got exactly what was due."""
        stream = self.streams[name]
        message = stream.message
        expected, reason = expected_output(message.token_ids, message.sampling)
        if stream.finish == "abort":
            assert stream.tokens == expected[: len(stream.tokens)]
            return
        assert stream.tokens == expected
        assert stream.finish == reason
        if message.sampling.prompt_logprobs is not None:
            prompt = message.token_ids
            due = [None, *(prompt_score(prompt[:i], prompt[i]) for i in range(1, len(prompt)))]
            sent = [d.prompt_logprobs for d in stream.deltas if d.prompt_logprobs]
            assert len(sent) == 1
            assert list(sent[0]) == due
        assert all(d.prompt_tokens == len(message.token_ids) for d in stream.deltas)
        assert len({d.cached_tokens for d in stream.deltas}) == 1

    def verify_all(self) -> None:
        for name in self.streams:
            self.verify(name)

    def verify_empty(self) -> None:
        """Nothing is left: after a flush every page is free."""
        assert not self.scheduler.has_work
        assert self.scheduler.flush_cache() == 0
        check_pages(self.scheduler)
        stats = self.scheduler.stats()
        assert stats.full_pages_free == stats.full_pages
        assert stats.window_pages_free == stats.window_pages
        assert stats.running == stats.waiting == 0
