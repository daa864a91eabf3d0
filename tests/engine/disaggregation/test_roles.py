"""The two halves of a disaggregated request over a simulated network, model and transport."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.engine.disaggregation.half import Deadlines
from interlock.engine.disaggregation.wire import Copy, Ended, HandOver, Matched, Message, Reserve
from interlock.engine.messages import TokenDelta
from tests.engine.disaggregation.pair import DEADLINES, STEP_SECONDS, Pair
from tests.engine.simulation import LONG, prompt_of


def failure(pair: Pair, name: str) -> TokenDelta:
    """What the client of the decode server was told: one error, no token."""
    stream = pair.decode.streams[name]
    assert stream.finish == "error", stream
    assert not stream.tokens
    assert len(stream.deltas) == 1
    return stream.last


def verify(pair: Pair, name: str) -> None:
    pair.decode.verify(name)
    first = pair.prefill.streams[name]
    assert first.finish == "length"
    assert first.tokens == pair.decode.streams[name].tokens[:1]


def serves(pair: Pair) -> None:
    """The pair answers the next request, and then holds nothing."""
    name = pair.add(prompt_of(41, salt=pair._rooms + 50), max_tokens=5, **LONG)
    pair.run()
    verify(pair, name)
    pair.verify_free()


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 64, 100])
def test_a_prompt_is_handed_over_once_and_again_when_it_is_cached(windows: Any, length: int) -> None:
    """Case H11: any number of chunks, among them none."""
    pair = Pair(windows)
    for _ in range(3):
        name = pair.add(prompt_of(length), max_tokens=9, prompt_logprobs=0, logprobs=2)
        pair.run()
        verify(pair, name)
        pair.verify_free()
    pair.network.sent_tokens = 0
    name = pair.add(prompt_of(length), max_tokens=3)
    pair.run()
    verify(pair, name)
    assert pair.network.sent_tokens <= (length if 6 in windows else length % 4), (
        "only what the decode server does not hold is sent"
    )


@pytest.mark.parametrize("most", [0, 1])
def test_few_tokens(most: int) -> None:
    pair = Pair()
    name = pair.add(prompt_of(20), max_tokens=most, **LONG)
    pair.run()
    assert pair.decode.streams[name].finish == "length"
    assert len(pair.decode.streams[name].tokens) == most
    pair.verify_free()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    windows=st.sampled_from([(None,), (6,), (None, 6), (None, 12)]),
    sizes=st.sampled_from([(4, 4), (8, 4), (16, 4)]),
    pages=st.sampled_from([(64, 64), (40, 40), (64, 34)]),
)
def test_random_workloads_get_the_answers_of_one_server(
    seed: int, windows: Any, sizes: tuple[int, int], pages: tuple[int, int]
) -> None:
    mine, theirs = (
        {
            "page_size": size,
            "full_pages": count * 4 // size + 4,
            "window_pages": count,
            "chunked_prefill_size": 32,
        }
        for size, count in zip(sizes, pages, strict=True)
    )
    pair = Pair(windows, prefill=mine, decode=theirs | {"max_running_requests": 4}, seed=seed)
    rng = random.Random(seed)
    names, gone = [], set()
    for _ in range(rng.randint(1, 14)):
        prompt = prompt_of(rng.randint(1, 70), salt=rng.choice([0, 0, 1, rng.randint(2, 9)]))
        name = pair.add(
            prompt,
            max_tokens=rng.randint(0, 24),
            min_tokens=0,
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(90), 2)),
            prompt_logprobs=rng.choice([None, None, 0]),
        )
        names.append(name)
        for _ in range(rng.randint(0, 5)):
            pair.talk(rng.randint(0, 4))
            pair.move(1)
            pair.tick()
        if rng.random() < 0.2:
            victim = rng.choice(names)
            if pair.decode.streams[victim].finish is None:
                pair.abort_decode(victim)
                gone.add(victim)
    pair.run()
    for name in names:
        pair.decode.verify(name)
        assert name in gone or pair.prefill.streams[name].finish == "length"
    pair.verify_free()


def paused(pair: Pair, name: str, where: str) -> None:
    """Let the pair go on until the request is in this state of one half."""
    for _ in range(2000):
        states = {
            **{
                f"p:{job.state.name}": job
                for job in pair.p._jobs.values()
                if job.message and job.message.request_id == name
            },
            **{f"d:{i.state.name}": i for i in pair.d._intakes.values() if i.message.request_id == name},
        }
        if where in states:
            return
        if pair.random.random() < 0.5:
            pair.talk(1)
        elif where != "p:SENDING" and where != "d:FINISHING":
            pair.move(1)
            pair.tick()
        else:
            pair.tick()
    raise AssertionError(f"never in {where}")


PREFILL_STATES = ("p:MEETING", "p:MATCHED", "p:COMPUTING", "p:SENDING")
DECODE_STATES = ("d:MEETING", "d:WAITING", "d:RECEIVING", "d:FINISHING")


@pytest.mark.parametrize("where", [*PREFILL_STATES, *DECODE_STATES])
@pytest.mark.parametrize("fault", ["abort prefill", "abort decode", "cut", "silence", "copy fails"])
def test_a_fault_in_any_state(where: str, fault: str) -> None:
    """Cases H03, H06, H07: one clear error or a whole answer, no page is kept, the next request is served."""
    for seed in range(4):
        pair = Pair(decode={"max_running_requests": 1}, seed=seed)
        other = pair.add(prompt_of(30, salt=3), max_tokens=20, **LONG)
        if where != "d:WAITING":
            pair.run()
        else:
            pair.talk()
            pair.tick()
        name = pair.add(prompt_of(70, salt=seed), max_tokens=6, **LONG)
        paused(pair, name, where)
        if fault == "abort prefill":
            pair.abort_prefill(name)
        elif fault == "abort decode":
            pair.abort_decode(name)
        elif fault == "cut":
            pair.cut()
        elif fault == "copy fails":
            pair.network.errors = lambda copy: "the wire is wet"
        else:
            pair.network.lose = lambda message: True
        pair.run()
        stream = pair.decode.streams[name]
        assert stream.finish is not None
        if stream.finish == "error":
            assert failure(pair, name).error
            assert stream.last.peer_failed
        elif stream.finish == "abort":
            assert fault == "abort decode"
        else:
            verify(pair, name)
        assert pair.prefill.streams[name].finish is not None
        assert pair.decode.streams[other].finish is not None
        pair.verify_free()
        pair.network.lose, pair.network.errors = (lambda message: False), (lambda copy: "")
        serves(pair)


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_a_half_that_never_comes(missing: str) -> None:
    pair = Pair()
    message = pair.message(prompt_of(20), max_tokens=4)
    (pair.to_decode if missing == "prefill" else pair.to_prefill)(message)
    pair.run()
    there = pair.decode if missing == "prefill" else pair.prefill
    assert there.streams[message.request_id].finish == "error"
    assert "5 s" in (there.streams[message.request_id].last.error or "")
    assert pair.time < DEADLINES.peer * 3
    serves(pair)


def test_the_second_half_hears_at_once_that_the_first_gave_up() -> None:
    pair = Pair()
    message = pair.message(prompt_of(20), max_tokens=4)
    pair.to_prefill(message)
    pair.abort_prefill(message.request_id)
    pair.to_decode(message)
    pair.talk()
    pair.tick()
    assert "aborted" in (failure(pair, message.request_id).error or "")
    other = pair.message(prompt_of(20), max_tokens=4)
    pair.to_decode(other)
    pair.talk()
    pair.abort_decode(other.request_id)
    pair.talk()
    pair.to_prefill(other)
    assert pair.prefill.streams[other.request_id].finish == "error"
    serves(pair)


def test_time_in_a_queue_is_not_time_that_the_peer_is_silent() -> None:
    """Case H04: ten requests of a slot, each of which takes longer than half the peer's deadline."""
    pair = Pair(decode={"max_running_requests": 1}, deadlines=Deadlines(peer=3.0, queue=500.0))
    names = [pair.add(prompt_of(9, salt=i), max_tokens=40, **LONG) for i in range(10)]
    pair.run(600)
    assert pair.time > 10 * 2
    for name in names:
        verify(pair, name)


def test_a_decode_servers_queue_time_counts_from_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until a slot comes free; and what waits is made ready once, not anew in every turn."""
    pair = Pair(decode={"max_running_requests": 1})
    monkeypatch.setattr(time, "monotonic", lambda: pair.time)
    names = [pair.add(prompt_of(9, salt=i), max_tokens=40, **LONG) for i in range(3)]
    pair.run()
    waited = sorted(pair.decode.streams[name].deltas[0].queue_seconds or 0.0 for name in names)
    steps = 39 * STEP_SECONDS
    assert [seconds >= before * steps for before, seconds in enumerate(waited)] == [True] * 3
    assert pair.decode.scheduler._arrivals == 3


def test_rooms_survive_an_abort_storm() -> None:
    """Case H04, second part, and H06: 50 requests, half of which are aborted on either side."""
    pair = Pair(decode={"max_running_requests": 3}, seed=5)
    rng = random.Random(5)
    names = [pair.add(prompt_of(rng.randint(1, 60), salt=i), max_tokens=12, **LONG) for i in range(50)]
    gone = set(rng.sample(names, 25))
    for name in gone:
        for _ in range(rng.randint(0, 3)):
            pair.talk(3)
            pair.move(1)
            pair.tick()
        half = pair.decode if rng.random() < 0.5 else pair.prefill
        if half.streams[name].finish is None:
            (pair.abort_decode if half is pair.decode else pair.abort_prefill)(name)
    pair.run(2000)
    for name in names:
        if name not in gone:
            verify(pair, name)
        assert pair.decode.streams[name].finish is not None
    pair.verify_free()


def test_pages_are_kept_until_nothing_is_read_or_written_any_more() -> None:
    """Case H05: an abort while a copy is slow; the pages of both sides stay out of use until it is over."""
    pair = Pair()
    name = pair.add(prompt_of(30), max_tokens=4, **LONG)
    pair.network.stalled = True
    paused(pair, name, "p:SENDING")
    copy = pair.network.copies[-1]
    pair.abort_decode(name)
    pair.talk()
    for _ in range(20):
        pair.tick()
        pair.talk()
    free = [set(s.scheduler.store.full.free_pages()) for s in (pair.prefill, pair.decode)]
    assert not set(copy.source_full) & free[0]
    assert not set(copy.target_full) & free[1]
    assert pair.decode.scheduler.stats().receiving == 1
    pair.network.stalled = False
    pair.run()
    pair.verify_free()
    serves(pair)


@pytest.mark.parametrize("abort", ["prefill", "decode"])
def test_an_abort_between_chunks_keeps_the_pages_that_are_read(abort: str) -> None:
    """Case H05: the scheduler lets a request go that it was still computing."""
    pair = Pair()
    name = pair.add(prompt_of(100), max_tokens=4, **LONG)
    pair.network.stalled = True
    while not pair.network.copies:
        pair.talk()
        pair.tick()
    assert any(job.state.name == "COMPUTING" for job in pair.p._jobs.values())
    copy = pair.network.copies[0]
    (pair.abort_prefill if abort == "prefill" else pair.abort_decode)(name)
    for _ in range(20):
        pair.talk()
        pair.tick()
    store = pair.prefill.scheduler.store
    assert store.full is not None
    assert not set(copy.source_full) & store.full.free_pages()
    assert store.tree is not None
    assert pair.prefill.scheduler.departures
    pair.network.stalled = False
    pair.run()
    pair.verify_free()
    serves(pair)


def test_a_transfer_that_stalls_for_ever_ends_in_an_error_and_a_cut() -> None:
    """The client is told after the deadline of that state; pages come back once the connection is cut."""
    pair = Pair()
    name = pair.add(prompt_of(30), max_tokens=4, **LONG)
    pair.network.stalled = True
    paused(pair, name, "p:SENDING")
    begun = pair.time
    while pair.decode.streams[name].finish is None:
        pair.talk()
        pair.tick()
    assert pair.time - begun < 3 * DEADLINES.peer
    failure(pair, name)
    while len(pair.d):
        pair.talk()
        pair.tick()
    assert pair.time - begun < 5 * DEADLINES.peer
    assert pair.prefill.scheduler.departures, "pages that a stalled copy may read stay"
    pair.network.stalled = False
    pair.run()
    serves(pair)


@pytest.mark.parametrize("wrong", ["tokens", "token"])
def test_a_hand_over_that_says_less_is_an_error(wrong: str) -> None:
    """Case H07: no token comes from incomplete keys."""
    pair = Pair()
    name = pair.add(prompt_of(30), max_tokens=4, **LONG)
    paused(pair, name, "p:SENDING")
    pair.move()
    while not any(isinstance(message, HandOver) for _, message in pair.network.to_decode):
        pair.tick()
    pair.network.to_decode = type(pair.network.to_decode)(
        (peer, msgspec.structs.replace(m, **{wrong: 29 if wrong == "tokens" else None}))
        if isinstance(m, HandOver)
        else (peer, m)
        for peer, m in pair.network.to_decode
    )
    pair.run()
    assert "29 of 30" in (failure(pair, name).error or "") or wrong == "token"
    serves(pair)


def test_duplicates_and_strangers_change_nothing() -> None:
    """Each message twice, and such of rooms that nobody has."""
    pair = Pair(seed=9)
    for each in (pair._peers, pair.p._service):
        send = each.send

        def twice(peer: int, message: Message, send: Any = send) -> None:
            send(peer, message)
            send(peer, message)

        each.send = twice  # type: ignore[method-assign, union-attr]
    names = [pair.add(prompt_of(10 * i + 1, salt=i), max_tokens=7, **LONG) for i in range(6)]
    for stranger in (Matched(key=(9, 9)), Ended(key=(9, 9), error="x")):
        pair.network.to_decode.append((1, stranger))
    pair.network.to_prefill.append((1, Reserve(key=(9, 9), held=0, window_start=0, full=(1,), window=(1,))))
    pair.run()
    for name in names:
        verify(pair, name)
    pair.verify_free()


def test_a_room_that_is_in_use_is_refused() -> None:
    pair = Pair()
    name = pair.add(prompt_of(20), max_tokens=4, **LONG)
    again = msgspec.structs.replace(pair.decode.streams[name].message, request_id="again")
    pair.to_decode(again)
    pair.to_prefill(again)
    for half in (pair.prefill, pair.decode):
        assert half.streams["again"].last.refused
        assert "unique" in (half.streams["again"].last.error or "")
    pair.run()
    verify(pair, name)


def test_different_requests_in_one_room_are_refused() -> None:
    pair = Pair()
    message = pair.message(prompt_of(20), max_tokens=4)
    pair.to_decode(message)
    pair.to_prefill(msgspec.structs.replace(message, token_ids=(1, 2, 3)))
    pair.run()
    assert failure(pair, message.request_id).refused
    serves(pair)


def test_requests_without_a_room_are_refused() -> None:
    pair = Pair()
    bare = msgspec.structs.replace(pair.message([1, 2]), meeting=None)
    pair.to_prefill(bare)
    pair.to_decode(bare)
    for half, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
        assert half.streams[bare.request_id].last.refused
        assert f"this is a {role} server" in (half.streams[bare.request_id].last.error or "")


def test_a_decode_server_that_asks_for_tokens_that_are_gone_is_refused() -> None:
    pair = Pair()
    name = pair.add(prompt_of(40), max_tokens=4, **LONG)
    paused(pair, name, "d:RECEIVING")
    pair.network.to_prefill = type(pair.network.to_prefill)(
        (peer, msgspec.structs.replace(m, window_start=0) if isinstance(m, Reserve) else m)
        for peer, m in pair.network.to_prefill
    )
    pair.run()
    assert "window" in (failure(pair, name).error or "")
    serves(pair)


def test_a_lost_connection_quarantines_pages_for_a_while() -> None:
    pair = Pair(quarantine=2.0)
    name = pair.add(prompt_of(30), max_tokens=4, **LONG)
    pair.network.stalled = True
    paused(pair, name, "d:FINISHING")
    copy: Copy = pair.network.copies[-1]
    pair.cut()
    begun = pair.time
    while pair.time < begun + 1.8:
        pair.tick()
        assert not set(copy.target_full) & pair.decode.scheduler.store.full.free_pages()  # type: ignore[union-attr]
    failure(pair, name)
    pair.network.stalled = False
    pair.run()
    serves(pair)


def test_only_what_a_computed_prompt_waits_for_is_exposed() -> None:
    """A copy that is done before the prompt is computed costs nothing; the wait for the last one counts."""
    pair = Pair()
    name = pair.add(prompt_of(90), max_tokens=4, **LONG)
    pair.network.stalled = True
    paused(pair, name, "p:SENDING")
    assert len(pair.network.copies) == 3, "each chunk's pages leave by themselves"
    for _ in range(20):
        pair.tick()
        pair.talk()
    assert pair.p.stats().exposed_seconds_total == 0
    pair.network.stalled = False
    pair.move()
    waited = pair.p.stats().exposed_seconds_total
    assert waited == pytest.approx(20 * STEP_SECONDS)
    pair.run()
    pair.add(prompt_of(90, salt=3), max_tokens=4, **LONG)
    while pair.busy:
        pair.talk()
        pair.tick()
        pair.move()
    assert pair.p.stats().handed_over_total == 2
    assert pair.p.stats().exposed_seconds_total == waited


def test_each_half_tells_what_its_transfers_hold() -> None:
    """Case H05, its metric: pages of a request that is over count until nothing reads or writes them."""
    pair = Pair(quarantine=2.0)
    name = pair.add(prompt_of(30), max_tokens=4, **LONG)
    pair.network.stalled = True
    paused(pair, name, "d:FINISHING")
    prefill, decode = pair.p.stats(), pair.d.stats()
    assert (prefill.role, prefill.states, prefill.copies_pending) == ("prefill", {"sending": 1}, 1)
    assert (decode.role, decode.states) == ("decode", {"finishing": 1})
    assert prefill.pages_held > 0 < decode.pages_held
    assert prefill.pages_quarantined == decode.pages_quarantined == 0
    assert prefill.tokens_total == 30
    pair.cut()
    pair.talk()
    pair.tick()
    prefill, decode = pair.p.stats(), pair.d.stats()
    assert (prefill.states, decode.states) == ({"failed": 1}, {"quarantined": 1})
    assert prefill.pages_quarantined == prefill.pages_held > 0
    assert decode.pages_quarantined == decode.pages_held > 0
    assert (prefill.failed_total, decode.failed_total) == (1, 1)
    pair.network.stalled = False
    pair.run()
    serves(pair)
    prefill, decode = pair.p.stats(), pair.d.stats()
    assert prefill.pages_held == decode.pages_held == prefill.copies_pending == 0
    assert prefill.states == decode.states == {}
    assert prefill.handed_over_total == decode.handed_over_total == 1
    assert decode.tokens_total == 41


def test_a_hand_over_at_the_wrong_time_is_an_error() -> None:
    """Messages of one request in another order, as no TCP connection brings them: nobody waits for ever."""
    pair = Pair()
    message = pair.message(prompt_of(20), max_tokens=4)
    pair.to_decode(message)
    early = HandOver(
        key=(message.meeting.room, 0),  # type: ignore[union-attr]
        tokens=20,
        token=1,
        logprob=None,
        prompt_logprobs=(),
        seed=0,
        cached_tokens=0,
    )
    pair.network.to_decode.append((1, early))
    pair.talk()
    pair.tick()
    assert "not asked for" in (failure(pair, message.request_id).error or "")
    pair.run()
    serves(pair)


@pytest.mark.parametrize("where", [*PREFILL_STATES, *DECODE_STATES])
def test_every_state_has_a_deadline(where: str) -> None:
    """Nothing moves any more but the clocks: whoever is in this state tells its client in time, and says for
    what it waited."""
    pair = Pair(decode={"max_running_requests": 1}, deadlines=Deadlines(peer=5.0, queue=11.0), seed=3)
    if where == "d:WAITING":
        pair.add(prompt_of(30, salt=3), max_tokens=50, **LONG)
        pair.talk()
        pair.tick()
    name = pair.add(prompt_of(70), max_tokens=6, **LONG)
    pair.network.stalled = where in ("p:SENDING", "d:FINISHING")
    paused(pair, name, where)
    role = pair.p if where[0] == "p" else pair.d
    entries = pair.p._jobs if where[0] == "p" else pair.d._intakes
    (entry,) = (each for each in entries.values() if each.message and each.message.request_id == name)
    due, waited = entry.deadline, entry.state.value
    assert due - pair.time <= 16.0
    pair.time = due - 0.01
    assert name not in {delta.request_id for delta in role.turn()}
    pair.time = due + 0.01
    (last,) = (delta for delta in role.turn() if delta.request_id == name)
    assert last.peer_failed
    assert waited in (last.error or "")


def test_a_key_is_handed_over_at_most_once_and_never_after_its_end() -> None:
    pair = Pair(decode={"max_running_requests": 3}, seed=11)
    last: dict[Any, list[str]] = {}
    send = pair.p._service.send

    def spy(peer: int, message: Message) -> None:
        if isinstance(message, HandOver | Ended):
            last.setdefault(message.key, []).append(type(message).__name__)
        send(peer, message)

    pair.p._service.send = spy  # type: ignore[method-assign]
    rng = random.Random(11)
    names = [pair.add(prompt_of(rng.randint(1, 90), salt=i), max_tokens=5, **LONG) for i in range(40)]
    for name in rng.sample(names, 20):
        pair.talk(3)
        pair.move(1)
        pair.tick()
        half = rng.choice([pair.decode, pair.prefill])
        if half.streams[name].finish is None:
            (pair.abort_decode if half is pair.decode else pair.abort_prefill)(name)
    pair.run(2000)
    assert len(last) == len(names)
    for said in last.values():
        assert said.count("HandOver") <= 1
        assert "HandOver" not in said[1:]
