"""Retraction, the prefix cache, bad rows and lock-step: public reports of groups E, F and G by their ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from interlock.engine.request import State
from interlock.engine.turns import Wanted, agree
from interlock.moe.terms import Phase
from tests.engine.simulation import LONG, Simulation, check_pages, prompt_of, sim_plan


def cached_tokens(sim: Simulation, name: str) -> int:
    return sim.streams[name].last.cached_tokens


def pressed(page_size: int = 4) -> tuple[Simulation, str, str]:
    """Two requests that together outgrow the pool, so that the newer one is retracted."""
    sim = Simulation(sim_plan(page_size=page_size, full_pages=-(-128 // page_size)))
    old = sim.add(prompt_of(30), max_tokens=90, **LONG)
    new = sim.add(prompt_of(30, 7), max_tokens=90, **LONG)
    return sim, old, new


def test_abort_of_a_retracted_request() -> None:
    """F09: it is found in the queue, and never resumed."""
    sim, old, new = pressed()
    while not sim.scheduler.stats().retractions_total:
        sim.step()
    request = sim.scheduler._requests[new]
    assert request.state is State.WAITING
    got = len(sim.streams[new].tokens)
    sim.abort(new)
    sim.run()
    assert len(sim.streams[new].tokens) == got
    sim.verify(old)
    sim.verify(new)
    sim.verify_empty()


# ---- retraction


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_retraction_keeps_every_token(page_size: int) -> None:
    """F12: the newer request is retracted, its unaligned tail freed exactly, and both outputs are whole."""
    sim, _, _ = pressed(page_size)
    sim.run()
    assert sim.scheduler.stats().retractions_total > 0
    sim.verify_all()
    sim.verify_empty()


@pytest.mark.parametrize("length", [20, 31, 32, 33])
def test_retraction_at_page_edges(length: int) -> None:
    """F12: shared prefix of 20 tokens, retraction at lengths around a page of 16."""
    sim = Simulation(sim_plan(page_size=16, full_pages=32))
    shared = prompt_of(20)
    keep = sim.add(shared, max_tokens=30, **LONG)
    sim.step()
    name = sim.add([*shared, 5][:21], max_tokens=40, **LONG)
    while sim.scheduler._requests[name].num_tokens < max(length, 22):
        sim.step()
    request = sim.scheduler._requests[name]
    sim.scheduler.batching.retract(request)
    check_pages(sim.scheduler)
    assert request.slot == -1
    sim.run()
    sim.verify(keep)
    sim.verify(name)
    sim.verify_empty()


def test_resume_with_a_new_prefix_hit() -> None:
    """F17: while a request with 30 prompt and 10 generated tokens is retracted, another caches the first
    32; it resumes on them, and the cached tokens that it reports stay those of its first admission."""
    sim = Simulation(sim_plan(page_size=4, full_pages=64))
    name = sim.add(prompt_of(30), max_tokens=30, **LONG)
    while len(sim.streams[name].tokens) < 10:
        sim.step()
    request = sim.scheduler._requests[name]
    sim.scheduler.batching.retract(request)
    sim.scheduler.flush_cache()
    other = sim.add(request.tokens[:33].tolist(), max_tokens=1, priority=-1, **LONG)
    while not sim.streams[other].finish:
        sim.step()
    sim.run()
    assert sim.scheduler.stats().prefix_hits_total == 32
    sim.verify_all()
    assert cached_tokens(sim, name) == 0


def test_seeded_stream_continues_at_its_position() -> None:
    """Positions of the draws are those of an undisturbed run, whatever is retracted."""
    sim, _, new = pressed()
    positions: dict[str, list[int]] = {}
    while sim.scheduler.has_work:
        batch = sim.step()
        assert batch is not None
        for request, position in zip(batch.requests, batch.sampling.positions.tolist(), strict=True):
            positions.setdefault(request.id, []).append(position)
    assert sim.scheduler.stats().retractions_total > 0
    assert positions[new] == list(range(30, 120))


def test_the_only_running_request_can_always_go_on() -> None:
    """F11: pool of 128 tokens; what would outgrow it is refused, what fits runs to its last token."""
    sim = Simulation(sim_plan(max_model_len=2048, full_pages=32))
    too_much = sim.add(prompt_of(100), max_tokens=1000, **LONG)
    assert sim.streams[too_much].finish == "error"
    fits = sim.add(prompt_of(100), max_tokens=29, **LONG)
    sim.run()
    sim.verify(fits)
    assert len(sim.streams[fits].tokens) == 29


# ---- prefix cache


@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
@pytest.mark.parametrize("length", [16, 32, 33, 48])
def test_exact_hit_computes_at_least_the_last_token(windows: tuple[int | None, ...], length: int) -> None:
    """E07, G10: page 16; the second answer equals the first, cached tokens < length, no page is lost."""
    sim = Simulation(sim_plan(windows, page_size=16, full_pages=32))
    first = sim.add(prompt_of(length), max_tokens=3, **LONG)
    sim.run()
    used = sim.scheduler.stats()
    again = sim.add(prompt_of(length), max_tokens=3, **LONG)
    sim.run()
    sim.verify_all()
    assert sim.streams[first].tokens == sim.streams[again].tokens
    assert cached_tokens(sim, first) == 0
    assert cached_tokens(sim, again) == (length - 1) // 16 * 16
    assert {d.cached_tokens for d in sim.streams[again].deltas} == {cached_tokens(sim, again)}
    after = sim.scheduler.stats()
    assert after.full_pages_free == used.full_pages_free
    assert after.window_pages_free == used.window_pages_free


def test_window_that_was_evicted_limits_the_match_but_not_to_zero() -> None:
    """E09: W 8, page 4, 200 tokens with window pages for 0..187: 188 tokens are reused."""
    sim = Simulation(sim_plan((None, 8), max_model_len=256, full_pages=200, window_pages=200))
    sim.add(prompt_of(200), max_tokens=0)
    sim.run()
    tree, window = sim.scheduler.store.tree, sim.scheduler.store.window
    assert tree is not None
    assert window is not None
    path = tree.match(np.array(prompt_of(200), dtype=np.int32), 100)
    lost = path[47:]
    kept = [node for node in tree._idle_windows if node not in lost]
    tree._idle_windows = dict.fromkeys([*lost, *kept])
    for _ in lost:
        window.give_one(tree.evict_window())
    check_pages(sim.scheduler)
    again = sim.add([*prompt_of(200), 5], max_tokens=4, **LONG)
    sim.run()
    sim.verify(again)
    assert cached_tokens(sim, again) == 188


def test_answer_sent_back_with_more_text() -> None:
    """E06: W 8, page 4, 20 + 40 tokens, then prompt + answer + 5 more equals a cold run; nothing leaks."""
    sim = Simulation(sim_plan((None, 8)))
    first = sim.add(prompt_of(20), max_tokens=40, **LONG)
    sim.run()
    follow_up = [*prompt_of(20), *sim.streams[first].tokens, 1, 2, 3, 4, 5]
    second = sim.add(follow_up, max_tokens=20, **LONG)
    sim.run()
    sim.verify_all()
    assert cached_tokens(sim, second) == 56
    sim.verify_empty()


def test_identical_prompts_in_one_step_share_pages_afterwards() -> None:
    """F15, F18: neither sees the other's pages in the step that computes them; afterwards both tables
    name the same pages, and the duplicates are free (the fake model would notice a stale one)."""
    sim = Simulation(sim_plan((None, 8), chunked_prefill_size=128))
    names = [sim.add(prompt_of(64), max_tokens=20, **LONG) for _ in range(2)]
    batch = sim.step()
    assert batch is not None
    assert [chunk.start for chunk in batch.chunks] == [0, 0]
    paths = [sim.scheduler._requests[name].path for name in names]
    assert paths[0] == paths[1]
    stats = sim.scheduler.stats()
    assert stats.full_pages - stats.full_pages_free == 16
    sim.model.full[[p * 4 + i for p in sim.scheduler.store.full.free_pages() for i in range(4)]] = -99
    sim.run()
    sim.verify_all()


def test_pages_stay_while_a_step_fills_them_though_their_other_reader_is_done() -> None:
    """An aborted request whose chunk is being computed, not its last one: the end of a copy frees nothing."""
    sim = Simulation(sim_plan(chunked_prefill_size=32))
    scheduler = sim.scheduler
    request = scheduler._requests[sim.add(prompt_of(100), max_tokens=4)]
    batch = scheduler.schedule()
    assert batch is not None
    assert not batch.requests
    request.holds = 1
    assert scheduler.abort(request.id)
    scheduler.release_hold(request)
    assert request.slot >= 0, "the step in flight writes to its pages"
    check_pages(scheduler)
    scheduler.commit(batch, sim.model.forward(batch))
    assert request.slot == -1
    sim.verify_empty()


def test_aborted_before_its_forward_publishes_nothing() -> None:
    """F18: A and B have the same prompt, A is aborted before its step ran: B computes everything itself;
    a page that was freed and taken again is not found under its old key."""
    sim = Simulation(sim_plan(full_pages=40))
    a = sim.add(prompt_of(64), max_tokens=2, **LONG)
    batch = sim.scheduler.schedule()
    assert batch is not None
    sim.abort(a)
    b = sim.add(prompt_of(64), max_tokens=2, **LONG)
    sim.receive(sim.scheduler.commit(batch, sim.model.forward(batch)))
    sim.run()
    sim.verify(b)
    assert cached_tokens(sim, b) == 0
    filler = [sim.add(prompt_of(100, salt), max_tokens=2, **LONG) for salt in (11, 12)]
    sim.run()
    late = sim.add(prompt_of(64), max_tokens=2, **LONG)
    sim.run()
    for name in (*filler, late):
        sim.verify(name)


def test_flush_while_running_and_when_idle() -> None:
    """F23: a flush leaves a running stream alone and says what is still in use; idle, it says 0 and the
    prompt sent again is computed from the start."""
    sim = Simulation(sim_plan((None, 8)))
    done = sim.add(prompt_of(40, 3), max_tokens=1, **LONG)
    sim.run()
    name = sim.add(prompt_of(40), max_tokens=50, **LONG)
    for _ in range(10):
        sim.step()
    assert sim.scheduler.flush_cache() > 0
    check_pages(sim.scheduler)
    sim.run()
    sim.verify_all()
    assert sim.scheduler.flush_cache() == 0
    for salt, old in ((0, name), (3, done)):
        again = sim.add(prompt_of(40, salt), max_tokens=1, **LONG)
        sim.run()
        assert cached_tokens(sim, again) == 0
        assert sim.streams[again].tokens == sim.streams[old].tokens[:1]


def test_without_prefix_cache_nothing_is_reused() -> None:
    sim = Simulation(sim_plan((None, 8), prefix_cache=False))
    for _ in range(2):
        name = sim.add(prompt_of(40), max_tokens=20, **LONG)
        sim.run()
        sim.verify(name)
        assert cached_tokens(sim, name) == 0
    stats = sim.scheduler.stats()
    assert stats.full_pages_free == stats.full_pages
    assert stats.window_pages_free == stats.window_pages


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_prompt_scores_are_whole_on_a_cached_prompt_and_after_retraction(
    windows: tuple[int | None, ...],
) -> None:
    """A request that wants prompt logprobs computes every prompt position once, whatever is cached; a
    retraction between chunks loses and repeats none."""
    sim = Simulation(sim_plan(windows, chunked_prefill_size=16))
    sim.add(prompt_of(60), max_tokens=5, **LONG)
    sim.run()
    name = sim.add(prompt_of(60), max_tokens=5, prompt_logprobs=0, **LONG)
    sim.step()
    sim.step()
    sim.scheduler.batching.retract(sim.scheduler._requests[name])
    sim.run()
    sim.verify_all()
    assert cached_tokens(sim, name) == 0


@pytest.mark.parametrize("windows", [(None, 8), (8,)])
def test_window_pages_stay_bounded(windows: tuple[int | None, ...]) -> None:
    """E08: while a sequence of 120 tokens runs, it never holds more window pages than window + chunk need."""
    sim = Simulation(sim_plan(windows, window_pages=8, chunked_prefill_size=16, prefix_cache=False))
    name = sim.add(prompt_of(60), max_tokens=60, **LONG)
    most = 0
    while sim.scheduler.has_work:
        sim.step()
        stats = sim.scheduler.stats()
        most = max(most, stats.window_pages - stats.window_pages_free)
    sim.verify(name)
    assert most <= 3


# ---- errors of rows, lock-step, counters


def test_error_of_a_row_ends_only_that_request_and_unpublishes_it() -> None:
    """A request whose logits are not finite ends with "error"; what only it had cached is dropped."""
    sim = Simulation(sim_plan())
    bad = sim.add(prompt_of(40), max_tokens=9, **LONG)
    good = sim.add([*prompt_of(16), 50, 51], max_tokens=9, **LONG)
    batch = sim.scheduler.schedule()
    assert batch is not None
    sim.receive(sim.scheduler.commit(batch, sim.model.forward(batch)))
    while not sim.streams[bad].finish:
        batch = sim.scheduler.schedule()
        assert batch is not None
        sampled = sim.model.forward(batch)
        rows = [i for i, request in enumerate(batch.requests) if request.id == bad]
        sampled.token_ids[rows] = -1
        sampled = replace(sampled, errors=dict.fromkeys(rows, "not finite"))
        sim.receive(sim.scheduler.commit(batch, sampled))
        check_pages(sim.scheduler)
    assert sim.streams[bad].finish == "error"
    assert sim.streams[bad].last.error == "not finite"
    sim.run()
    sim.verify(good)
    again = sim.add(prompt_of(40), max_tokens=2, **LONG)
    sim.run()
    sim.verify(again)
    assert cached_tokens(sim, again) <= 16


def test_agreement_alternates_and_serves_whoever_has_work() -> None:
    prefill, decode, both = Wanted(None, 5, 0), Wanted(None, 0, 2), Wanted(None, 5, 2)
    idle = Wanted(None, 0, 0)
    assert agree([idle, idle], Phase.DECODE) is None
    assert agree([prefill, idle], Phase.PREFILL) is Phase.PREFILL
    assert agree([idle, decode], Phase.DECODE) is Phase.DECODE
    assert agree([prefill, decode], Phase.PREFILL) is Phase.DECODE
    assert agree([both, idle], Phase.DECODE) is Phase.PREFILL


def test_replicas_in_lock_step_all_finish() -> None:
    """Two replicas with different work run every step in the same phase; idle ones run empty steps."""
    sims = [Simulation(sim_plan(full_pages=40)) for _ in range(2)]
    for index in range(12):
        sims[index % 4 == 0].add(prompt_of(5 + 7 * index, index), max_tokens=10 + index, **LONG)
    last: Phase | None = None
    steps = Counter[str]()
    while True:
        phase = agree([sim.scheduler.wanted() for sim in sims], last)
        if phase is None:
            break
        last = phase
        for sim in sims:
            batch = sim.scheduler.schedule(phase) or sim.scheduler.idle_step(phase)
            assert batch.phase is phase
            bound = sim.scheduler.wanted()
            assert bound.tokens >= 0
            steps["idle" if not batch.arrays.live_tokens else phase.value] += 1
            sim.receive(sim.scheduler.commit(batch, sim.model.forward(batch)))
            check_pages(sim.scheduler)
        assert sum(steps.values()) < 5000
    assert steps["idle"] > 0
    for sim in sims:
        assert not sim.scheduler.has_work
        sim.verify_all()
        sim.verify_empty()


def test_wanted_is_an_upper_bound_and_changes_nothing() -> None:
    sim = Simulation(sim_plan(chunked_prefill_size=16))
    for salt in range(3):
        sim.add(prompt_of(20, salt), max_tokens=6)
    while sim.scheduler.has_work:
        wanted = sim.scheduler.wanted()
        assert wanted == sim.scheduler.wanted()
        batch = sim.step()
        assert batch is not None
        assert batch.phase is wanted.phase
        assert batch.arrays.live_tokens <= wanted.tokens


def test_commit_of_another_batch_is_refused() -> None:
    sim = Simulation(sim_plan())
    sim.add(prompt_of(5), max_tokens=5)
    batch = sim.scheduler.schedule()
    assert batch is not None
    with pytest.raises(RuntimeError, match="must be committed"):
        sim.scheduler.schedule()
    sampled = sim.model.forward(batch)
    sim.scheduler.commit(batch, sampled)
    with pytest.raises(RuntimeError, match="in flight for longest"):
        sim.scheduler.commit(batch, sampled)


def test_counters_add_up() -> None:
    """J09: started = finished + aborted + running, totals only grow, tokens counted once."""
    sim = Simulation(sim_plan(full_pages=40))
    names = [sim.add(prompt_of(10, i), max_tokens=8, **LONG) for i in range(20)]
    for _ in range(6):
        sim.step()
    for name in names[10:]:
        sim.abort(name)
    sim.run()
    stats = sim.scheduler.stats()
    ended = Counter(stream.finish for stream in sim.streams.values())
    assert ended == {"length": 20 - stats.aborts_total, "abort": stats.aborts_total}
    assert stats.generated_tokens_total == sum(len(stream.tokens) for stream in sim.streams.values())
    assert sim.phases.count(Phase.PREFILL) == stats.steps_prefill_total
    assert sim.phases.count(Phase.DECODE) == stats.steps_decode_total
    first = [stream.deltas[0] for stream in sim.streams.values() if stream.tokens]
    assert all(delta.queue_seconds is not None and delta.queue_seconds >= 0 for delta in first)


@pytest.mark.parametrize("windows", [(8,), (None, 8)])
def test_retraction_for_want_of_window_pages(windows: tuple[int | None, ...]) -> None:
    """Short prompts whose windows grow beyond the window space: the newest give way, nothing is lost."""
    sim = Simulation(sim_plan(windows, full_pages=400, window_pages=12, max_running_requests=8))
    for salt in range(8):
        sim.add([salt], max_tokens=40, **LONG)
    sim.run()
    assert sim.scheduler.stats().retractions_total > 0
    sim.verify_all()
    sim.verify_empty()


@pytest.mark.parametrize("cached", [False, True])
def test_a_window_pool_for_all_requests_admits_all(cached: bool) -> None:
    """Requests whose windows are full hold no more pages later, so nothing needs to be kept free for them."""
    count, window, page = 8, 8, 4
    each = window // page + 1
    plan = sim_plan(
        (window,),
        page_size=page,
        window_pages=count * each + 5,
        chunked_prefill_size=16,
        max_running_requests=count,
        prefix_cache=cached,
    )
    sim = Simulation(plan)
    for index in range(count):
        sim.add(prompt_of(16, salt=index), max_tokens=60, ignore_eos=True)
    most = 0
    while sim.scheduler.has_work:
        sim.step()
        most = max(most, sim.scheduler.stats().running)
    assert most == count
    assert sim.scheduler.stats().retractions_total == 0
    sim.verify_all()
