"""Public reports of groups E, F, G and J as scheduler tests; each docstring names its case."""

from __future__ import annotations

import msgspec
import pytest

from interlock.engine.admission import prompt_array, refusal
from interlock.engine.messages import AddRequest, SamplingParams
from interlock.kv.store import Geometry
from tests.engine.simulation import (
    EOS,
    LONG,
    VOCAB,
    Simulation,
    check_pages,
    expected_output,
    prompt_of,
    sim_plan,
)

# ---- what can never run is refused at once


def test_request_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    """F01: pool of 256 tokens, limit 4096: only the offender is refused, five others complete."""
    sim = Simulation(sim_plan(max_model_len=4096, full_pages=64))
    big = sim.add(prompt_of(300), max_tokens=5)
    assert sim.streams[big].finish == "error"
    error = sim.streams[big].last.error or ""
    assert "304 tokens" in error
    assert "256" in error
    assert sim.add(prompt_of(200), "half", max_tokens=200) == "half"
    assert sim.streams["half"].finish == "error"
    others = [sim.add(prompt_of(20, i), max_tokens=10) for i in range(5)]
    sim.run()
    for name in others:
        sim.verify(name)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"),
    [
        *((126, 1, True), (126, 2, True), (126, 3, False), (127, 1, True), (127, 2, False)),
        *((128, 0, True), (128, 1, False), (129, 0, False), (129, 1, False), (5000, 1, False)),
        *((1, 127, True), (1, 200, False)),
    ],
)
def test_context_limit_table(prompt: int, max_tokens: int, fits: bool) -> None:
    """F20: limit 128, exact at the edge; refused with limit and number, nothing clamped; server goes on."""
    sim = Simulation(sim_plan(max_model_len=128, full_pages=32))
    name = sim.add(prompt_of(prompt), max_tokens=max_tokens, **LONG)
    if fits:
        sim.run()
        sim.verify(name)
        assert len(sim.streams[name].tokens) == max_tokens
    else:
        assert sim.streams[name].finish == "error"
        assert "128" in (sim.streams[name].last.error or "")
        assert str(prompt + max_tokens) in (sim.streams[name].last.error or "")
    short = sim.add([1, 2, 3], max_tokens=3, **LONG)
    sim.run()
    sim.verify(short)
    sim.verify_empty()


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {}, "no tokens"),
        ([1, -1], {}, "token id -1"),
        ([1, VOCAB], {}, f"token id {VOCAB}"),
        ([1], {"n": 2}, "n = 2"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"min_p": 2.0}, "min_p"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([1], {"frequency_penalty": float("inf")}, "frequency_penalty"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"logit_bias": {1: float("inf")}}, "logit_bias"),
        ([1], {"logprobs": VOCAB + 1}, "alternatives"),
        ([1], {"prompt_logprobs": -1}, "alternatives"),
    ],
)
def test_malformed_requests_end_with_an_error_and_nothing_else(
    prompt: list[int], params: dict[str, object], text: str
) -> None:
    """G14, G18 (second line of defence behind the server's own checks): never an exception."""
    sim = Simulation(sim_plan())
    name = sim.add(prompt, **params)
    assert sim.streams[name].finish == "error"
    assert text in (sim.streams[name].last.error or "")
    assert not sim.scheduler.has_work
    assert sim.scheduler.schedule() is None


def test_duplicate_live_id_is_refused_and_the_first_goes_on() -> None:
    """F21: the second request with a live id gets an error; the id is free again afterwards."""
    sim = Simulation(sim_plan())
    name = sim.add(prompt_of(9), "same", max_tokens=6, **LONG)
    sim.step()
    message = AddRequest(request_id="same", token_ids=(1, 2), sampling=SamplingParams())
    (refused,) = sim.scheduler.add(message)
    assert refused.finish_reason == "error"
    assert "unique" in (refused.error or "")
    sim.run()
    sim.verify(name)
    assert sim.scheduler.add(message) == []


# ---- max_tokens, min_tokens, stops


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
@pytest.mark.parametrize("length", [1, 4, 9, 70])
def test_exact_number_of_tokens(max_tokens: int, prompt_logprobs: int | None, length: int) -> None:
    """F19, G04: 0 gives prompt scores only, 1 exactly one token, and the reason is "length"."""
    sim = Simulation(sim_plan())
    name = sim.add(prompt_of(length), max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, ignore_eos=True)
    sim.run()
    sim.verify(name)
    stream = sim.streams[name]
    assert len(stream.tokens) == max_tokens
    assert stream.finish == "length"
    assert len(stream.deltas) == max(1, max_tokens)
    assert sim.scheduler.stats().generated_tokens_total == max_tokens
    sim.verify_empty()


def find_prompt(wanted: int, at: int) -> list[int]:
    """A prompt after which the fake model says ``wanted`` as its ``at``-th token, and not before."""
    for salt in range(100_000):
        prompt = [salt % VOCAB, salt // VOCAB % VOCAB, salt // VOCAB**2]
        output, _ = expected_output(prompt, SamplingParams(max_tokens=at, ignore_eos=True))
        if output[-1] == wanted and wanted not in output[:-1]:
            return prompt
    raise AssertionError("no such prompt")


def test_stop_rules() -> None:
    """End of sequence, stop tokens, ignore_eos and min_tokens; the matched token is included and named."""
    prompt = find_prompt(EOS, 3)
    sim = Simulation(sim_plan())
    plain = sim.add(prompt, max_tokens=20)
    ignoring = sim.add(prompt, max_tokens=20, ignore_eos=True)
    late = sim.add(prompt, max_tokens=20, min_tokens=4)
    exact = sim.add(prompt, max_tokens=3)
    output, _ = expected_output(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    stop = sim.add(prompt, max_tokens=20, ignore_eos=True, stop_token_ids=(output[1],))
    sim.run()
    sim.verify_all()
    assert sim.streams[plain].tokens == output[:3]
    assert sim.streams[plain].last.stop_token_id == EOS
    assert len(sim.streams[ignoring].tokens) == 20
    assert len(sim.streams[late].tokens) > 3
    assert sim.streams[exact].finish == "stop"
    assert sim.streams[stop].tokens == output[:2]
    assert sim.streams[stop].last.stop_token_id == output[1]


def test_several_end_of_sequence_ids() -> None:
    """Every id of the card ends a request."""
    prompt = find_prompt(7, 2)
    plan = sim_plan()
    sim = Simulation(
        msgspec.structs.replace(plan, card=msgspec.structs.replace(plan.card, eos_token_ids=(EOS, 7)))
    )
    name = sim.add(prompt, max_tokens=9)
    sim.run()
    assert sim.streams[name].finish == "stop"
    assert sim.streams[name].last.stop_token_id == 7


# ---- fairness and slots


def test_neither_decode_nor_prefill_starves() -> None:
    """F05: a running stream waits at most 4 steps between tokens while 40 long prompts arrive."""
    sim = Simulation(
        sim_plan(max_model_len=512, full_pages=4096, max_running_requests=64, page_size=16), checked=False
    )
    runner = sim.add([1, 2, 3], max_tokens=200, **LONG)
    sim.step()
    gap = 0
    for step in range(400):
        if step < 40:
            sim.add(prompt_of(300, step), max_tokens=2, **LONG)
        before = len(sim.streams[runner].tokens)
        if not sim.scheduler.has_work:
            break
        sim.step()
        gap = 0 if len(sim.streams[runner].tokens) > before else gap + 1
        assert gap <= 4 or sim.streams[runner].finish
    sim.run()
    sim.verify_all()


def test_short_prompt_is_admitted_soon_after_slots_are_free() -> None:
    """F05, reversed: decodes that never pause do not keep a new prompt out."""
    sim = Simulation(sim_plan(full_pages=400))
    for salt in range(6):
        sim.add(prompt_of(10, salt), max_tokens=100, **LONG)
    for _ in range(10):
        sim.step()
    late = sim.add(prompt_of(10, 50), max_tokens=2, **LONG)
    for _ in range(4):
        sim.step()
    assert sim.streams[late].finish == "length"


def test_all_slots_are_used_after_chunked_prompts() -> None:
    """F04: fullness comes from counts: after 200 mixed requests, running still reaches its maximum."""
    sim = Simulation(sim_plan(max_running_requests=4, full_pages=400), checked=False)
    for index in range(200):
        sim.add(prompt_of(90 if index % 2 else 3, index), max_tokens=3)
    sim.run()
    names = [sim.add(prompt_of(5, 300 + i), max_tokens=50, **LONG) for i in range(8)]
    most = 0
    while sim.scheduler.has_work:
        sim.step()
        most = max(most, sim.scheduler.stats().running)
    assert most == 4
    for name in names:
        sim.verify(name)


def test_waiting_requests_take_no_running_slot() -> None:
    """F03: only admitted requests count as running; the queue is counted apart."""
    sim = Simulation(sim_plan(max_running_requests=2))
    for salt in range(5):
        sim.add(prompt_of(6, salt), max_tokens=4, **LONG)
    sim.step()
    stats = sim.scheduler.stats()
    assert (stats.running, stats.waiting) == (2, 3)
    sim.run()
    sim.verify_all()


def test_priority_orders_admission_and_chunks() -> None:
    """A smaller priority number is served first, also before a long prompt that is half computed."""
    sim = Simulation(sim_plan(max_running_requests=1))
    sim.add(prompt_of(5), "first", max_tokens=3, **LONG)
    sim.step()
    sim.add(prompt_of(5, 1), "low", priority=5, max_tokens=3, **LONG)
    sim.add(prompt_of(5, 2), "high", priority=-5, max_tokens=3, **LONG)
    ends: list[str] = []
    while sim.scheduler.has_work:
        sim.step()
        ends += [n for n, s in sim.streams.items() if s.finish and n not in ends]
    assert ends == ["first", "high", "low"]

    sim = Simulation(sim_plan(full_pages=200))
    sim.add(prompt_of(120), "long", max_tokens=1, **LONG)
    sim.step()
    sim.add(prompt_of(20, 9), "urgent", priority=-1, max_tokens=1, **LONG)
    batch = sim.step()
    assert batch is not None
    assert [chunk.request.id for chunk in batch.chunks] == ["urgent", "long"]
    sim.run()
    sim.verify_all()


@pytest.mark.parametrize("length", [63, 64, 65, 100])
def test_prompt_longer_than_the_prefill_budget(length: int) -> None:
    """F22: it is cut into chunks of the budget, whatever its length."""
    sim = Simulation(sim_plan(chunked_prefill_size=16))
    name = sim.add(prompt_of(length), max_tokens=2, **LONG)
    sim.run()
    sim.verify(name)
    assert sim.scheduler.stats().steps_prefill_total == -(-length // 16)


# ---- abort


@pytest.mark.parametrize("after", [0, 1, 3, 7, 9])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
def test_abort_in_chunked_prefill(after: int, windows: tuple[int | None, ...]) -> None:
    """F07, F08: abort while queued, after chunks 1, 3 and the last, and while decoding; the prompt sent
    again equals a cold run, no lock is left."""
    sim = Simulation(sim_plan(windows, chunked_prefill_size=16))
    first = sim.add(prompt_of(100), max_tokens=20, **LONG)
    for _ in range(after):
        sim.step()
    sim.abort(first)
    assert sim.streams[first].finish == "abort"
    assert not sim.scheduler.has_work
    assert all(node.refs == 0 for node in sim.scheduler.store.tree.walk())
    stats = sim.scheduler.stats()
    assert stats.full_pages_free + stats.full_pages_cached == stats.full_pages
    assert stats.window_pages_free + stats.window_pages_cached == stats.window_pages
    again = sim.add(prompt_of(100), max_tokens=20, **LONG)
    sim.run()
    sim.verify(again)
    sim.verify_empty()


def test_abort_while_the_step_runs_and_twice_and_unknown() -> None:
    """F09, F13: an abort between schedule and commit yields one last delta, and the step's result is
    dropped; aborting again, or an id nobody knows, says nothing."""
    sim = Simulation(sim_plan())
    victim = sim.add(prompt_of(40), max_tokens=50, **LONG)
    other = sim.add(prompt_of(10, 4), max_tokens=5, **LONG)
    for _ in range(4):
        batch = sim.scheduler.schedule()
        assert batch is not None
        if len(sim.streams[victim].deltas) == 1:
            sim.abort(victim)
        sim.receive(sim.scheduler.commit(batch, sim.model.forward(batch)))
        check_pages(sim.scheduler)
    assert sim.streams[victim].finish == "abort"
    assert sim.scheduler.abort(victim) == []
    assert sim.scheduler.abort("nobody") == []
    sim.run()
    sim.verify(other)
    assert sim.scheduler.abort(other) == []
    assert sim.scheduler.stats().aborts_total == 1
    sim.verify_empty()


@pytest.mark.parametrize("wrong", [-1, 2**31, -(2**31) - 1, 2**63, 2**70])
def test_an_id_of_any_size_is_refused_by_its_name(wrong: int) -> None:
    """Not one that wraps around into the vocabulary."""
    tokens = prompt_array((5, wrong))
    assert (tokens is None) == (wrong != -1)
    geometry = Geometry(page_size=16, has_full=True, window=None, full_pages=8, window_pages=0)
    message = AddRequest(request_id="a", token_ids=(5, wrong), sampling=SamplingParams(max_tokens=2))
    text = refusal(message, max_model_len=64, vocab_size=480, geometry=geometry, tokens=tokens)
    assert text == f"token id {wrong} is not in the vocabulary, whose ids are 0 to 479"
