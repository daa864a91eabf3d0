"""A model in this process, stepped by hand: no scheduler, no workers, no server.

    logprobs = run_model(folder, token_ids, chunks=[16, 3, 1])     # [n, V], row i predicts token i + 1

Pages are handed out in a shuffled order; pages behind the sliding window are taken out of the table and
filled with NaN, as a scheduler may reuse them at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from interlock.checkpoint.open import open_checkpoint
from interlock.checkpoint.source import Progress, WeightSource, no_progress
from interlock.kernels.registry import get_kernels
from interlock.kv.cache import KVCache, allocate
from interlock.models.card_reader import read_model_card
from interlock.models.registry import model_families
from interlock.moe.build import build_moe_context
from interlock.moe.terms import Phase
from interlock.nn.attention_backends.registry import build_attention
from interlock.nn.context import ModelContext
from interlock.parallel.topology import Groups
from interlock.plan.card import ModelCard
from interlock.plan.launch_plan import LaunchPlan
from interlock.plugins import load_symbol
from interlock.step import PageMap, Step
from tests.plans import make_plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class CachedSequence:
    """One sequence in the cache: its pages by absolute page index in both page spaces."""

    full: list[int]
    window: list[int]
    length: int = 0


@dataclass
class Harness:
    """A loaded model with its cache."""

    plan: LaunchPlan
    model: Any
    cache: KVCache
    source: WeightSource
    _free: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = random.Random(0)
        for space, count in (("full", self.plan.full_pages), ("window", self.plan.window_pages)):
            self._free[space] = order.sample(range(count), count)

    def new_sequence(self, max_tokens: int) -> CachedSequence:
        """Reserve pages for a sequence of at most ``max_tokens``."""
        pages = -(-max_tokens // self.plan.page_size)
        full, window = ([self._free[space].pop() for _ in range(pages)] for space in ("full", "window"))
        return CachedSequence(full, window)

    def release(self, sequence: CachedSequence) -> None:
        """Give all pages back; what they held is poisoned."""
        for space, table in (("full", sequence.full), ("window", sequence.window)):
            held = [page for page in table if page >= 0]
            self._free[space] += held
            for page in held:
                self._poison(page, windowed=space == "window")
        sequence.full, sequence.window = [], []

    @torch.inference_mode()
    def step(
        self,
        work: Sequence[tuple[CachedSequence, Sequence[int]]],
        *,
        padding: int = 0,
        phase: Phase | None = None,
    ) -> torch.Tensor:
        """Run the next tokens of some sequences in one step -> logits float32 [all their tokens, V]."""
        counts = [len(tokens) for _, tokens in work]
        live = sum(counts)
        for sequence, tokens in work:
            self._evict(sequence)
            sequence.length += len(tokens)
        positions = [
            position
            for (sequence, tokens) in work
            for position in range(sequence.length - len(tokens), sequence.length)
        ]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        token_ids = [token for _, tokens in work for token in tokens]
        device = self.plan.device
        description = Step(
            phase=phase or (Phase.DECODE if all(n == 1 for n in counts) else Phase.PREFILL),
            token_ids=torch.tensor(token_ids + [0] * padding, dtype=torch.int64, device=device),
            positions=torch.tensor(positions + [0] * padding, dtype=torch.int64, device=device),
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            kv_len=torch.tensor([each.length for each, _ in work], dtype=torch.int32, device=device),
            full=self._page_map("full", work, padding),
            window=self._page_map("window", work, padding),
            sample_rows=torch.arange(live, device=device),
            live_tokens=live,
        )
        hidden = self.model.forward(description, self.cache)
        assert hidden.shape == (live + padding, self.plan.card.hidden_size)
        return self.model.logits(hidden[description.sample_rows])

    def _evict(self, sequence: CachedSequence) -> None:
        """Give up window pages that the next token can no longer see, and poison them."""
        windows = [layer.attention.window for layer in self.plan.card.layers if layer.attention.window]
        if not windows:
            return
        first_visible = sequence.length - (max(windows) + self.plan.sliding_window_extra) + 1
        for index in range(max(0, first_visible) // self.plan.page_size):
            page, sequence.window[index] = sequence.window[index], -1
            if page >= 0:
                self._poison(page, windowed=True)
                self._free["window"].append(page)

    def _poison(self, page: int, *, windowed: bool) -> None:
        for layer, cache in zip(self.plan.card.layers, self.cache.layers, strict=True):
            if bool(layer.attention.window) == windowed:
                cache.k[page].fill_(float("nan"))
                cache.v[page].fill_(float("nan"))

    def _page_map(
        self, space: str, work: Sequence[tuple[CachedSequence, Sequence[int]]], padding: int
    ) -> PageMap:
        size = self.plan.page_size
        tables = [getattr(sequence, space) for sequence, _ in work]
        longest = max((len(table) for table in tables), default=0)
        slots = [
            table[position // size] * size + position % size
            for table, (sequence, tokens) in zip(tables, work, strict=True)
            for position in range(sequence.length - len(tokens), sequence.length)
        ]
        rows = [table + [-1] * (longest - len(table)) for table in tables]
        device = self.plan.device
        table = torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), longest)
        return PageMap(table, torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device))


def build_model(
    folder: str | Path,
    *,
    groups: Groups | None = None,
    edit_card: Callable[[ModelCard], ModelCard] | None = None,
    progress: Progress = no_progress,
    **overrides: Any,
) -> Harness:
    """Read the card, plan (``overrides`` replace items), build and load the model, allocate its cache.

    ``edit_card`` changes what config.json says, for tests that must notice it.
    """
    card = read_model_card(folder)
    plan = make_plan(edit_card(card) if edit_card else card, model_path=folder, **overrides)
    device = torch.device(plan.device)
    kernels = get_kernels(plan.kernels, threads=plan.threads)
    groups = groups or Groups.single()
    context = ModelContext(
        plan=plan,
        kernels=kernels,
        attention=build_attention(plan.attention_backend, kernels),
        groups=groups,
        device=device,
        dtype=DTYPES[plan.dtype],
        moe=build_moe_context(plan, groups, kernels, device),
    )
    model = load_symbol(model_families()[plan.model_family].model)(context)
    source = open_checkpoint(plan, progress=progress)
    model.load(source)
    return Harness(plan, model, allocate(plan, device), source)


def cut(total: int, chunks: int | Sequence[int] | None) -> list[int]:
    """Chunk lengths: None for one, a number for equal ones, or the lengths (what is left comes last)."""
    if chunks is None:
        return [total]
    if isinstance(chunks, int):
        return [min(chunks, total - start) for start in range(0, total, chunks)]
    lengths, left = [], total
    for length in chunks:
        if left > 0:
            lengths.append(min(length, left))
            left -= length
    return [*lengths, left] if left > 0 else lengths


def run_chunks(
    harness: Harness, token_ids: Sequence[int], chunks: int | Sequence[int] | None = None, *, padding: int = 0
) -> torch.Tensor:
    """Log-probabilities float64 [n, V] of one new sequence, computed chunk by chunk."""
    sequence, done, rows = harness.new_sequence(len(token_ids)), 0, []
    for length in cut(len(token_ids), chunks):
        rows.append(harness.step([(sequence, token_ids[done : done + length])], padding=padding))
        done += length
    harness.release(sequence)
    return torch.log_softmax(torch.cat(rows).double(), -1)


def run_model(
    folder: str | Path,
    token_ids: Sequence[int],
    *,
    chunks: int | Sequence[int] | None = None,
    **plan_overrides: Any,
) -> torch.Tensor:
    """Log-probabilities float64 [n, V] of ``token_ids``; row i predicts token i + 1.

    ``chunks``: None computes all tokens in one prefill step, a number or a list of lengths cuts them (a chunk
    of one token is a decode step); what came before is then found in the cache.
    """
    return run_chunks(build_model(folder, **plan_overrides), token_ids, chunks)
