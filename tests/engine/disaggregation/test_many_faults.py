"""Random workloads with a random fault at a random moment: 60 in every run, 300 in the slow mode."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.engine.disaggregation.pair import DEADLINES, Pair
from tests.engine.simulation import LONG, check_pages, prompt_of

Fault = Callable[[Pair, random.Random, str], None]


def cut(pair: Pair, rng: random.Random, name: str) -> None:
    pair.cut()


def abort_prefill(pair: Pair, rng: random.Random, name: str) -> None:
    if pair.prefill.streams[name].finish is None:
        pair.abort_prefill(name)


def abort_decode(pair: Pair, rng: random.Random, name: str) -> None:
    if pair.decode.streams[name].finish is None:
        pair.abort_decode(name)


def stall(pair: Pair, rng: random.Random, name: str) -> None:
    pair.network.stalled = True


def fail_copies(pair: Pair, rng: random.Random, name: str) -> None:
    pair.network.errors = lambda copy: "the wire is wet" if rng.random() < 0.5 else ""


def lose(pair: Pair, rng: random.Random, name: str) -> None:
    pair.network.lose = lambda message: rng.random() < 0.3


def duplicate(pair: Pair, rng: random.Random, name: str) -> None:
    for queue in (pair.network.to_decode, pair.network.to_prefill):
        for each in list(queue):
            queue.append(each)


def reorder(pair: Pair, rng: random.Random, name: str) -> None:
    """TCP keeps the order within a connection; copies of different requests may overtake each other."""
    copies = list(pair.network.copies)
    rng.shuffle(copies)
    pair.network.copies.clear()
    pair.network.copies.extend(copies)


def prefill_is_another(pair: Pair, rng: random.Random, name: str) -> None:
    """The prefill server is killed and started again: it knows nothing of what was."""
    pair.restart_prefill()


FAULTS: tuple[Fault, ...] = (
    *(cut, abort_prefill, abort_decode, stall, fail_copies, lose, duplicate, reorder, prefill_is_another),
)


def one(seed: int) -> str:
    """One workload and one fault. Returns the fault's name."""
    rng = random.Random(seed)
    fault = FAULTS[seed % len(FAULTS)]
    pages = rng.choice([64, 64, 40])
    pair = Pair(
        rng.choice([(None,), (6,), (None, 6)]),
        decode={"full_pages": pages, "window_pages": pages, "max_running_requests": rng.choice([1, 3, 8])},
        seed=seed,
    )
    names = []
    for index in range(rng.randint(1, 8)):
        length = rng.randint(1, 90)
        names.append(
            pair.add(prompt_of(length, salt=rng.choice([0, index])), max_tokens=rng.randint(0, 20), **LONG)
        )
    for _ in range(rng.randint(0, 40)):
        pair.talk(rng.randint(0, 4))
        pair.move(rng.randint(0, 2))
        pair.tick()
    begun = pair.time
    fault(pair, rng, rng.choice(names))
    while any(pair.decode.streams[name].finish is None for name in names):
        pair.talk(rng.randint(0, 6))
        pair.move(rng.randint(0, 3))
        pair.tick()
        assert pair.time - begun < 3 * (DEADLINES.queue + DEADLINES.peer), "a client waits for ever"
    pair.network.stalled = False
    pair.network.lose, pair.network.errors = (lambda message: False), (lambda copy: "")
    pair.run(400)
    for name in names:
        stream = pair.decode.streams[name]
        assert stream.finish is not None
        if stream.finish == "error":
            assert not stream.tokens, "an error after tokens"
            assert stream.last.error
        else:
            pair.decode.verify(name)
    pair.verify_free()
    last = pair.add(prompt_of(37, salt=seed % 90), max_tokens=4, **LONG)
    pair.run()
    pair.decode.verify(last)
    for simulation in (pair.prefill, pair.decode):
        check_pages(simulation.scheduler)
    return fault.__name__


def test_sixty_faults() -> None:
    """Every client gets a whole answer or one error in time, every page comes back, the pair goes on."""
    assert {one(seed) for seed in range(60)} == {fault.__name__ for fault in FAULTS}


@pytest.mark.slow
def test_three_hundred_faults() -> None:
    assert {one(seed) for seed in range(60, 360)} == {fault.__name__ for fault in FAULTS}
