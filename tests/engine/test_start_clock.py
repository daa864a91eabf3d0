"""Where a start's time went."""

from __future__ import annotations

from interlock.engine.start_clock import StartClock


def test_spans_follow_each_other_and_add_up() -> None:
    times = iter([103.0, 104.5, 110.0, 110.25])
    clock = StartClock(100.0, now=lambda: next(times))
    for span in ("process and imports", "waiting for ranks", "weights", "waiting for ranks"):
        clock.mark(span)
    clock.tell(compiled={"kernels": 93})
    assert clock.report() == {
        "spans": {"process and imports": 3.0, "waiting for ranks": 1.75, "weights": 5.5},
        "seconds": 10.25,
        "compiled": {"kernels": 93},
    }
    assert str(clock) == "started in 10.2 s: process and imports 3.0, waiting for ranks 1.8, weights 5.5"


def test_without_a_beginning_it_begins_now() -> None:
    times = iter([5.0, 6.0])
    clock = StartClock(now=lambda: next(times))
    clock.mark("building")
    assert clock.report()["seconds"] == 1.0
