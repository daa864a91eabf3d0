"""The steps that a rank runs before it says ready: one of each phase, through every layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from interlock.moe.terms import Phase
from interlock.plan.launch_plan import LaunchPlan
from interlock.step import PageMap, Step

WARM_UP_TOKENS = 4


def warm_up_phases(plan: LaunchPlan, device: torch.device) -> Iterator[list[Step]]:
    """A prefill step of a few tokens of one sequence, and a decode step of as many sequences.

    On a GPU then prefill steps of a full chunk and of one token less: other kernels serve them, which are
    compiled at their first launch, for odd numbers of rows apart. So are those of decode steps that no graph
    holds, by the number of parts that a sequence's keys are cut into.
    """
    tokens = min(WARM_UP_TOKENS, plan.chunked_prefill_size, plan.max_model_len)
    sequences = min(WARM_UP_TOKENS, plan.max_running_requests)
    yield [
        _step(plan, device, Phase.PREFILL, lengths=[tokens]),
        _step(plan, device, Phase.DECODE, lengths=[1] * sequences),
    ]
    if device.type == "cuda":
        for total in range(plan.chunked_prefill_size, max(tokens, plan.chunked_prefill_size - 2), -1):
            yield [_step(plan, device, Phase.PREFILL, lengths=_cut(total, plan.max_model_len))]
        yield [_step(plan, device, Phase.DECODE, lengths=[1] * size) for size in eager_batches(plan)]


def eager_batches(plan: LaunchPlan) -> list[int]:
    """Numbers of sequences of decode steps that no graph holds, ascending: the largest, and of those below it
    the powers of two and one and a half times these. None on a server that only prefills.

    Kernels are compiled for powers of two of the parts into which keys are cut. The parts are inversely
    proportional to n, so one kernel serves n to 1.5 n at least.
    """
    if plan.disaggregation_mode == "prefill":
        return []
    most, held = plan.max_running_requests, max(plan.cuda_graph_sizes, default=0)
    powers = [1 << exponent for exponent in range(most.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2)} | {most}
    return sorted(size for size in sizes if held < size <= most)


def _cut(total: int, longest: int) -> list[int]:
    """Lengths of sequences that hold ``total`` tokens."""
    full, rest = divmod(total, longest)
    return [longest] * full + [rest] * (rest > 0)


def _step(plan: LaunchPlan, device: torch.device, phase: Phase, lengths: list[int]) -> Step:
    """Sequences that start at position 0 and use the first pages, which hold nothing yet."""
    page = plan.page_size
    counts = torch.tensor(lengths, dtype=torch.int32)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    positions = torch.cat([torch.arange(length, dtype=torch.int64) for length in lengths])
    pages_each = -(-max(lengths) // page)
    token_ids = torch.arange(len(positions), dtype=torch.int64) % plan.card.vocab_size

    def pages(total: int) -> PageMap | None:
        if total == 0:
            return None
        table = (
            torch.arange(len(lengths) * pages_each, dtype=torch.int32).view(len(lengths), pages_each) % total
        )
        rows = torch.repeat_interleave(torch.arange(len(lengths)), counts.long())
        slots = table[rows, positions // page].long() * page + positions % page
        return PageMap(table=table.to(device), slots=slots.to(device))

    return Step(
        phase=phase,
        token_ids=token_ids.to(device),
        positions=positions.to(device),
        query_start=starts.to(device),
        kv_len=counts.to(device),
        full=pages(plan.full_pages),
        window=pages(plan.window_pages),
        sample_rows=(ends - 1).long().to(device),
        live_tokens=len(positions),
    )
