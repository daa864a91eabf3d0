"""Launchers that start one process for each rank and say so in variables, torchrun among them."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.engine.endpoints import Place, free_ports
from interlock.errors import Refusal
from interlock.launcher import read_launcher
from interlock.options import Options
from tests.e2e.conftest import Answers
from tests.e2e.processes import (
    BASE,
    READY,
    SERVE,
    Served,
    answers,
    assert_same_answers,
    environment,
    running,
)

VARIABLES = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


def test_the_variables_of_a_launcher_become_the_launch() -> None:
    launcher = read_launcher(VARIABLES, Options.of())
    assert launcher is not None
    options = launcher.applied_to(Options.of(page_size=8))
    assert {name: given.value for name, given in options.given.items()} == {
        "page_size": 8,
        "tp_size": 4,
        "nnodes": 2,
        "node_rank": 1,
        "dist_init": "10.0.0.7:29500",
    }
    assert options.given["tp_size"].by_launcher
    assert not options.given["page_size"].by_launcher
    place = launcher.place()
    assert (place.ranks, place.ranks_on_node, place.is_first) == (range(3, 4), 2, False)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_of_a_launch_has_its_own_place(nodes: int, each: int, data: st.DataObject) -> None:
    world = nodes * each
    places: list[Place] = []
    for rank in range(world):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank % each), "LOCAL_WORLD_SIZE": str(each)}
        launcher = read_launcher({**VARIABLES, **variables, "WORLD_SIZE": str(world)}, Options.of())
        if world == 1:
            assert launcher is None
            return
        assert launcher is not None
        assert (launcher.nnodes, launcher.node_rank) == (nodes, rank // each)
        places.append(launcher.place())
    assert [place.ranks for place in places] == [range(rank, rank + 1) for rank in range(world)]
    assert [place.is_first for place in places] == [True] + [False] * (world - 1)


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
def test_an_incomplete_launcher_is_refused_by_the_variable_that_is_missing(name: str) -> None:
    left = {key: value for key, value in VARIABLES.items() if key != name}
    with pytest.raises(Refusal, match=f"^{name}: is not set"):
        read_launcher(left, Options.of())


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "4"},
        {"RANK": "2"},
        {"LOCAL_WORLD_SIZE": "3"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"WORLD_SIZE": "many"},
        {"RANK": "-1"},
        {"MASTER_PORT": "http"},
    ],
    ids=str,
)
def test_variables_that_do_not_fit_each_other_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(Refusal):
        read_launcher({**VARIABLES, **changes}, Options.of())


def test_a_size_that_contradicts_the_launcher_is_refused() -> None:
    launcher = read_launcher(VARIABLES, Options.of())
    assert launcher is not None
    with pytest.raises(Refusal, match=r"--tp-size 2: a launcher started one process .* WORLD_SIZE says 4"):
        launcher.applied_to(Options.of(tp_size=2))
    assert launcher.applied_to(Options.of(tp_size=4)).given["tp_size"].by_launcher is False


@pytest.mark.parametrize("given", [{"node_rank": 1}, {"dist_init": "10.0.0.7:1"}], ids=str)
def test_nodes_that_the_user_numbers_are_no_launchers_ranks(given: dict[str, object]) -> None:
    """Cluster operators set RANK and WORLD_SIZE for each machine; scripts then pass --node-rank $RANK."""
    assert read_launcher(VARIABLES, Options.of(**given)) is None


def test_without_the_size_of_a_machine_the_number_of_machines_must_be_given() -> None:
    variables = {key: value for key, value in VARIABLES.items() if key != "LOCAL_WORLD_SIZE"}
    launcher = read_launcher(variables, Options.of(nnodes=2))
    assert launcher is not None
    assert launcher.local_world_size == 2


def test_torchrun_starts_every_rank_and_ends_them_all(one_process: Answers) -> None:
    """torchrun itself hosts the ranks' store; rank 0's process answers HTTP."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    flags = ("--port", "0", "--moe-a2a-backend", "shared_memory")
    with running([*torchrun, *SERVE[1:], *BASE, *flags]) as process:
        served = Served(process, process.wait_for(READY)[1])
        got = answers(lambda body: served.post("/v1/completions", body).raise_for_status().json())
        assert_same_answers(got, one_process)
        assert len(served.receipts()) == 2
        assert served.provenance("tp_size") == {"source": "launcher", "reason": "launcher's WORLD_SIZE"}
        assert sum(READY.search(line) is not None for line in process.lines) == 1
        children = psutil.Process(process.popen.pid).children(recursive=True)
        process.signal(signal.SIGTERM)
        process.wait()
        _, alive = psutil.wait_procs(children, 10)
        assert alive == []
        assert "a signal came: new requests are refused, running ones may finish" in process.text
        assert "interlock: rank" not in process.text


def test_any_launcher_of_two_machines_with_the_usual_variables(one_process: Answers) -> None:
    """Two machines of one rank each, as mpirun or srun with a wrapper would start them; a kill ends both."""
    port = str(free_ports("127.0.0.1", 1)[0])
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                running(
                    [*SERVE, *BASE, "--port", "0", "--stall-timeout", "5"],
                    env=environment(**world, MASTER_PORT=port, RANK=str(rank)),
                )
            )
            for rank in range(2)
        )
        served = Served(first, first.wait_for(READY)[1])
        got = answers(lambda body: served.post("/v1/completions", body).raise_for_status().json())
        assert_same_answers(got, one_process)
        assert {items["nnodes"] for items in served.receipts().values()} == {2}
        (rank,) = second.ranks()
        rank.kill()
        for process in (first, second):
            assert process.wait(20) == 1, process.text
            assert "interlock: rank 1 was killed by SIGKILL" in process.text


def test_the_module_is_the_command() -> None:
    with running(["-m", "interlock", "--help"]) as process:
        assert process.wait() == 0
        assert "Usage: interlock" in process.text
