"""What a scheduler counts, and how it tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.engine.messages import SchedulerStats
from interlock.kv.store import PageStore


@dataclass(slots=True)
class Counters:
    """Counts that only grow."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    retractions: int = 0
    aborts: int = 0
    steps_prefill: int = 0
    steps_decode: int = 0

    def stats(
        self, store: PageStore, *, replica: int, running: int, waiting: int, receiving: int
    ) -> SchedulerStats:
        """``*_pages_cached`` are pages that only the prefix cache holds (they can be evicted), so
        total - free - cached pages are in use by requests."""
        full, window, tree = store.full, store.window, store.tree
        return SchedulerStats(
            replica=replica,
            running=running,
            waiting=waiting,
            receiving=receiving,
            full_pages=full.total if full else 0,
            full_pages_free=full.free if full else 0,
            full_pages_cached=tree.full_idle if tree else 0,
            window_pages=window.total if window else 0,
            window_pages_free=window.free if window else 0,
            window_pages_cached=tree.window_idle if tree else 0,
            prompt_tokens_total=self.prompt_tokens,
            generated_tokens_total=self.generated_tokens,
            prefix_queries_total=self.prefix_queries,
            prefix_hits_total=self.prefix_hits,
            retractions_total=self.retractions,
            aborts_total=self.aborts,
            steps_prefill_total=self.steps_prefill,
            steps_decode_total=self.steps_decode,
        )
