"""Builds the arrays of a step from the slot table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from interlock.engine.batch import Batch, Chunk, Int32s, Int64s, PromptScores, SamplingRows, StepArrays
from interlock.engine.request import Request
from interlock.engine.slots import SlotTable
from interlock.moe.terms import Phase

_NO_ROWS: Int64s = np.zeros(0, dtype=np.int64)


def decode_batch(
    table: SlotTable,
    requests: tuple[Request, ...],
    slots: Int64s,
    page_size: int,
    *,
    sources: Int64s | None = None,
) -> Batch:
    """One token for each of the given requests: the last one known, whose keys are not cached yet.

    With ``sources`` it is the one after that, which is still being drawn by those rows of the step before.
    """
    lead = 0 if sources is None else 1
    length = table.length[slots] + lead
    positions = length - 1
    count = len(slots)
    page, offset = np.divmod(positions, page_size)
    longest = int(page.max()) + 1
    rows = np.arange(count, dtype=np.int64)

    def page_map(pages: Int32s | None) -> tuple[Int32s | None, Int64s | None]:
        if pages is None:
            return None, None
        return pages[slots, :longest], pages[slots, page].astype(np.int64) * page_size + offset

    full_table, full_slots = page_map(table.full)
    window_table, window_slots = page_map(table.window)
    arrays = StepArrays(
        phase=Phase.DECODE,
        token_ids=table.tokens[slots, positions - lead].astype(np.int64),
        positions=positions,
        query_start=np.arange(count + 1, dtype=np.int32),
        kv_len=length.astype(np.int32),
        full_table=full_table,
        full_slots=full_slots,
        window_table=window_table,
        window_slots=window_slots,
        sample_rows=rows,
        prompt_rows=_NO_ROWS,
        live_tokens=count,
    )
    return Batch(
        arrays=arrays,
        requests=requests,
        slots=slots,
        sampling=SamplingRows.of(table, slots, lead=lead),
        sources=sources,
    )


def prefill_batch(table: SlotTable, chunks: Sequence[Chunk], page_size: int) -> Batch:
    """The tokens of several chunks, one sequence each."""
    slots = np.array([chunk.request.slot for chunk in chunks], dtype=np.int64)
    start = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    end = np.array([chunk.end for chunk in chunks], dtype=np.int64)
    counts = end - start
    query_start = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    total = int(query_start[-1])
    owner = np.repeat(slots, counts)
    positions = np.arange(total, dtype=np.int64) + np.repeat(start - query_start[:-1], counts)
    page, offset = np.divmod(positions, page_size)
    longest = int(-(-end.max() // page_size))

    def page_map(pages: Int32s | None) -> tuple[Int32s | None, Int64s | None]:
        if pages is None:
            return None, None
        return pages[slots, :longest], pages[owner, page].astype(np.int64) * page_size + offset

    full_table, full_slots = page_map(table.full)
    window_table, window_slots = page_map(table.window)
    sampled = [index for index, chunk in enumerate(chunks) if samples(chunk)]
    prompt_rows, scores = _prompt_scores(table, chunks, query_start)
    arrays = StepArrays(
        phase=Phase.PREFILL,
        token_ids=table.tokens[owner, positions].astype(np.int64),
        positions=positions,
        query_start=query_start.astype(np.int32),
        kv_len=end.astype(np.int32),
        full_table=full_table,
        full_slots=full_slots,
        window_table=window_table,
        window_slots=window_slots,
        sample_rows=query_start[1:][sampled] - 1,
        prompt_rows=prompt_rows,
        live_tokens=total,
    )
    sample_slots = slots[sampled]
    return Batch(
        arrays=arrays,
        requests=tuple(chunks[index].request for index in sampled),
        slots=sample_slots,
        sampling=SamplingRows.of(table, sample_slots),
        chunks=tuple(chunks),
        prompt_scores=scores,
    )


def samples(chunk: Chunk) -> bool:
    """Whether a token is drawn after the chunk."""
    return chunk.finishes and chunk.request.params.max_tokens > 0


def _prompt_scores(
    table: SlotTable, chunks: Sequence[Chunk], query_start: Int64s
) -> tuple[Int64s, tuple[PromptScores, ...]]:
    rows: list[Int64s] = []
    scores: list[PromptScores] = []
    for index, chunk in enumerate(chunks):
        request = chunk.request
        if request.prompt_logprobs is None:
            continue
        first = max(chunk.start, request.scored)
        last = min(chunk.end, request.prompt_len - 1)
        if first >= last:
            continue
        offset = int(query_start[index]) - chunk.start
        rows.append(np.arange(first + offset, last + offset, dtype=np.int64))
        targets = table.tokens[request.slot, first + 1 : last + 1].astype(np.int64)
        scores.append(PromptScores(request, targets))
    return (np.concatenate(rows) if rows else _NO_ROWS), tuple(scores)
