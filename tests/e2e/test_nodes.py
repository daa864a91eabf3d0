"""Two nodes as two groups of processes of this machine: one server, which ends as one, whoever fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from interlock.engine.endpoints import free_ports
from tests.e2e.conftest import Answers
from tests.e2e.processes import (
    BASE,
    READY,
    SERVE,
    Process,
    Served,
    answers,
    assert_same_answers,
    running,
)

QUICK = ("--stall-timeout", "5")
END_SECONDS = 10.0


@contextmanager
def two_nodes(*flags: str, second: tuple[str, ...] | None = None) -> Iterator[tuple[Process, Process]]:
    """Both started at once; ``second`` replaces the flags of node 1."""
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    nodes = ("--nnodes", "2", "--dist-init", address, *QUICK)
    with ExitStack() as stack:
        yield tuple(  # type: ignore[misc]
            stack.enter_context(
                running([*SERVE, *BASE, "--port", "0", *nodes, "--node-rank", str(rank), *own])
            )
            for rank, own in enumerate((flags, flags if second is None else second))
        )


@contextmanager
def two_nodes_ready(*flags: str) -> Iterator[tuple[Served, Process]]:
    with two_nodes(*flags) as (first, second):
        yield Served(first, first.wait_for(READY)[1]), second


@pytest.mark.parametrize(
    "mode",
    [
        ("--tp-size", "2", "--moe-a2a-backend", "collective"),
        pytest.param(("--tp-size", "4", "--attn-dp-size", "2"), marks=pytest.mark.slow),
        pytest.param(
            ("--tp-size", "4", "--attn-dp-size", "2", "--moe-a2a-backend", "collective"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_two_nodes_answer_as_one_process_and_a_signal_to_either_ends_both(
    one_process: Answers, mode: tuple[str, ...]
) -> None:
    with two_nodes_ready(*mode) as (served, second):
        got = answers(lambda body: served.post("/v1/completions", body).raise_for_status().json())
        assert_same_answers(got, one_process)
        receipts = served.receipts()
        half = len(receipts) // 2
        assert [items["node_rank"] for items in receipts.values()] == [0] * half + [1] * half
        assert {items["nnodes"] for items in receipts.values()} == {2}
        assert "ready" not in second.text
        second.signal(signal.SIGTERM)
        assert second.wait() == 0, second.text
        assert served.process.wait() == 0, served.process.text
        assert "node 1 was told to end" in served.process.text


def test_a_signal_to_the_first_node_ends_both_in_order() -> None:
    with two_nodes_ready("--tp-size", "2") as (served, second):
        served.process.signal(signal.SIGTERM)
        assert served.process.wait() == 0, served.process.text
        assert second.wait() == 0, second.text


@pytest.mark.parametrize("victim", [0, 1])
def test_every_node_ends_with_the_first_error_when_a_rank_is_killed(victim: int) -> None:
    with two_nodes_ready("--tp-size", "2") as (served, second):
        ranks = (*served.process.ranks(), *second.ranks())
        assert len(ranks) == 2
        ranks[victim].kill()
        for node in (served.process, second):
            assert node.wait(END_SECONDS) == 1, node.text
            (first_error,) = [line for line in node.lines if line.startswith("interlock: ")]
            assert first_error == f"interlock: rank {victim} was killed by SIGKILL", node.text
        with pytest.raises(httpx.TransportError):
            served.get("/health")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_killed_ends_the_other(victim: int) -> None:
    with two_nodes_ready("--tp-size", "2") as (served, second):
        nodes = (served.process, second)
        nodes[victim].signal(signal.SIGKILL)
        nodes[victim].wait()
        left = nodes[1 - victim]
        assert left.wait(END_SECONDS) == 1, left.text
        assert f"rank {1 - victim}: " in left.text or f"rank {victim}" in left.text, left.text
        assert "Traceback" not in left.text


def test_nodes_with_different_options_are_refused_by_name() -> None:
    with two_nodes("--tp-size", "2", second=("--tp-size", "2", "--page-size", "8")) as nodes:
        for node in nodes:
            assert node.wait(90) == 1, node.text
            assert "--page-size: node 1 has page_size = 8, and node 0 has 16" in node.text


def test_a_node_that_waits_for_the_first_one_ends_by_a_signal() -> None:
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    flags = ("--tp-size", "2", "--nnodes", "2", "--dist-init", address, "--node-rank", "1")
    with running([*SERVE, *BASE, *flags]) as node:
        node.wait_for("node 1: ranks 1 to 1 of 2; requests are answered on node 0")
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 143, node.text


def test_an_address_of_another_machine_is_refused_on_the_first_node() -> None:
    flags = ("--tp-size", "2", "--nnodes", "2", "--dist-init", "192.0.2.77:29500")
    with running([*SERVE, *BASE, "--port", "0", *flags]) as node:
        assert node.wait() == 1
        assert "--dist-init 192.0.2.77:29500: cannot listen on 192.0.2.77, and this is the first" in node.text
