"""The verdict names the rank that failed first, whatever the order of the news."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.messages import Heartbeat, RankFailed
from interlock.engine.supervisor import Exit, Pulse, Verdict

CAUSE = RankFailed(rank=2, error="CheckpointError: tensor lm_head.weight is missing")
CONSEQUENCE = RankFailed(rank=0, error="RuntimeError: Connection closed by peer", is_consequence=True)


def test_cause_is_told_before_its_consequences_in_every_order_of_arrival() -> None:
    for order in itertools.permutations(
        [CAUSE, CONSEQUENCE, RankFailed(rank=1, error="x", is_consequence=True)]
    ):
        verdict = Verdict(failures=list(order), exits=[Exit(0, 1), Exit(1, 1), Exit(2, 1)])
        assert verdict.first_error().splitlines()[0] == f"rank 2: {CAUSE.error}"


def test_a_killed_rank_comes_before_what_its_peers_saw() -> None:
    verdict = Verdict(failures=[CONSEQUENCE], exits=[Exit(0, 1), Exit(3, -9)])
    assert verdict.first_error().splitlines()[0] == "rank 3 was killed by SIGKILL"


def test_a_rank_that_reported_is_not_told_twice() -> None:
    verdict = Verdict(failures=[CAUSE], exits=[Exit(2, 1)])
    assert verdict.first_error() == f"rank 2: {CAUSE.error}"


def beat(rank: int, activity: str, seconds: float) -> Heartbeat:
    return Heartbeat(rank=rank, iteration=1, activity=activity, activity_seconds=seconds)


@given(st.floats(0, 1000), st.sampled_from(["idle", "loading"]))
def test_idle_and_loading_ranks_never_stall(seconds: float, activity: str) -> None:
    pulse = Pulse(range(1), timeout=10)
    pulse.note(beat(0, activity, seconds))
    assert pulse.stalled() == []


def test_the_rank_that_others_wait_for_is_named() -> None:
    pulse = Pulse(range(3), timeout=10)
    pulse.note(beat(0, "waiting for ranks", 11))
    pulse.note(beat(1, "computing", 11))
    pulse.note(beat(2, "waiting for ranks", 11))
    (line,) = pulse.stalled()
    assert line.startswith("rank 1 has been computing")


def test_ranks_that_all_wait_are_all_named() -> None:
    pulse = Pulse(range(2), timeout=10)
    for rank in range(2):
        pulse.note(beat(rank, "waiting for ranks", 11))
    assert len(pulse.stalled()) == 2


def test_a_silent_rank_is_named_and_the_busy_ones_are_not() -> None:
    pulse = Pulse(range(2), timeout=10)
    pulse.note(beat(0, "computing", 0.1))
    pulse.note(beat(1, "waiting for ranks", 20))
    pulse._seen[0] = time.monotonic() - 30
    (line,) = pulse.stalled()
    assert line.startswith("rank 0 has been silent for 30 s")


def test_a_silent_rank_is_the_reason_why_a_busy_one_hangs() -> None:
    pulse = Pulse(range(2), timeout=4)
    pulse.note(beat(0, "computing", 4.5))
    pulse.note(beat(1, "computing", 0.1))
    assert pulse.stalled()[0].startswith("rank 0 has been computing")
    pulse._seen[1] = time.monotonic() - 4.4
    (line,) = pulse.stalled()
    assert line.startswith("rank 1 has been silent for 4 s")


def test_a_rank_that_told_its_end_is_not_silent() -> None:
    pulse = Pulse(range(2), timeout=4)
    for rank in range(2):
        pulse.note(beat(rank, "computing", 0.1))
        pulse._seen[rank] = time.monotonic() - 60
    pulse.forget(0)
    pulse.note(beat(0, "computing", 0.1))
    (line,) = pulse.stalled()
    assert line.startswith("rank 1 has been silent")


def test_what_passes_while_the_watcher_is_suspended_is_no_silence() -> None:
    """A front end that was stopped for half a minute goes on; then ranks are silent as ever."""
    clock = [0.0]
    pulse = Pulse(range(2), timeout=8, now=lambda: clock[0])
    for rank in range(2):
        pulse.note(beat(rank, "idle", 0.1))
    clock[0] = 30.0
    assert pulse.stalled() == pulse.silent(2.5) == []
    while clock[0] < 37.5:
        clock[0] += 0.5
        pulse.note(beat(0, "idle", 0.1))
        assert pulse.stalled() == []
    clock[0] += 0.9
    (line,) = pulse.stalled()
    assert line.startswith("rank 1 has been silent for 8 s")
