"""How ranks find each other, and what a user is told when they do not."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import pytest

from interlock.engine.endpoints import free_ports, network_endpoints, own_address
from interlock.engine.same_launch import refuse_other_launch
from interlock.errors import StartupError
from interlock.models.card_reader import read_model_card
from interlock.parallel.interface import interface_addresses, interface_towards
from interlock.parallel.launch import Rendezvous
from interlock.parallel.store_address import StoreAddress
from interlock.plan.launch_plan import LaunchPlan, Provenance, Source
from tests.plans import make_plan
from tests.tiny import flash, tiny_folder

S = TypeVar("S", bound=msgspec.Struct)


@pytest.fixture
def address() -> StoreAddress:
    return StoreAddress(address=f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}")


def test_ranks_that_never_come_are_missed(address: StoreAddress) -> None:
    with pytest.raises(
        StartupError, match=r"not all of the 2 ranks joined at 127.* within 1 s .*--node-rank"
    ):
        Rendezvous.open(address, rank=0, size=2, timeout=1, join_timeout=1)


def test_a_first_node_that_never_comes_is_missed(address: StoreAddress) -> None:
    with pytest.raises(StartupError, match=r"--dist-init 127.*: no answer for 1 s"):
        Rendezvous.open(address, rank=1, size=2, timeout=1, join_timeout=1)


def test_a_port_that_is_taken_is_named(address: StoreAddress) -> None:
    with (
        socket.create_server((address.host, address.port)),
        pytest.raises(StartupError, match=r"--dist-init 127.*: rank 0 cannot listen there"),
    ):
        Rendezvous.open(address, rank=0, size=2, timeout=1, join_timeout=1)


def test_a_name_that_does_not_resolve_is_named() -> None:
    where = StoreAddress(address="no.such.host.invalid:29500")
    with pytest.raises(
        StartupError, match=r"--dist-init no\.such\.host\.invalid:29500: rank 0 cannot listen"
    ):
        Rendezvous.open(where, rank=0, size=2, timeout=1, join_timeout=1)


def test_addresses_of_both_families_are_read() -> None:
    assert (StoreAddress(address="[fd00::2]:29500").host, StoreAddress(address="h:1").port) == ("fd00::2", 1)


def test_the_interface_is_the_one_that_packets_leave_from() -> None:
    loopback = interface_addresses()["127.0.0.1"]
    assert interface_towards("127.0.0.1", 1) == loopback
    names = {name for _, name in socket.if_nameindex()}
    assert set(interface_addresses().values()) <= names


def test_the_front_end_listens_on_the_address_that_was_given() -> None:
    endpoints = network_endpoints(2, "127.0.0.1:29500")
    all_of_them = (*endpoints.inputs, endpoints.outputs, endpoints.news)
    assert len(set(all_of_them)) == 4
    assert all(each.startswith("tcp://127.0.0.1:") for each in all_of_them)


def test_a_name_that_means_loopback_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many distributions map the machine's own name to 127.0.1.1, where no other machine finds it."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with pytest.raises(StartupError, match=r"node7 is 127\.0\.1\.1 on this machine"):
        own_address("node7:29500")
    assert own_address("localhost:29500") == "127.0.1.1"


@pytest.fixture
def plan() -> LaunchPlan:
    return make_plan(read_model_card(tiny_folder(flash())), tp_size=2, nnodes=2)


def changed(struct: S, **items: object) -> S:
    return msgspec.structs.replace(struct, **items)


def test_nodes_with_the_same_options_agree_whatever_their_size(plan: LaunchPlan) -> None:
    mine = changed(plan, node_rank=1, full_pages=7, threads=9, max_running_requests=3, port=9, host="::1")
    refuse_other_launch(mine, plan)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ({"dtype": "bfloat16"}, "--dtype: node 1 has dtype = bfloat16, and node 0 has float32"),
        ({"moe_a2a_backend": "collective"}, "--moe-a2a-backend: node 1 has"),
        ({"kernels": "cpu"}, "--kernels: node 1 has"),
        ({"seed": 5}, "--seed: node 1 has"),
        ({"deterministic": True}, "--deterministic: node 1 has"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_different_option_is_named(plan: LaunchPlan, items: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        refuse_other_launch(changed(plan, node_rank=1, **items), plan)


def test_a_size_that_the_user_set_must_be_the_same(plan: LaunchPlan) -> None:
    asked = {"max_running_requests": Provenance(Source.USER, "flag --max-running-requests")}
    with pytest.raises(StartupError, match="--max-running-requests: node 1 has max_running_requests = 3"):
        refuse_other_launch(changed(plan, node_rank=1, max_running_requests=3, provenance=asked), plan)


def test_another_checkpoint_or_too_little_memory_is_told(plan: LaunchPlan) -> None:
    other = changed(plan.card, max_position=plan.card.max_position + 1)
    with pytest.raises(StartupError, match=r"config\.json of node 1 differs"):
        refuse_other_launch(changed(plan, node_rank=1, card=other), plan)
    small = changed(plan.memory, available=10)
    first = changed(plan, memory=changed(plan.memory, weights=11))
    with pytest.raises(StartupError, match="node 1 has 10 for each"):
        refuse_other_launch(changed(plan, node_rank=1, memory=small), first)


def test_ranks_wait_for_the_slowest_without_a_collective(address: StoreAddress) -> None:
    order: list[str] = []

    def rank_main(rank: int) -> Rendezvous:
        rendezvous = Rendezvous.open(address, rank=rank, size=2, timeout=0.1, join_timeout=20)
        if rank == 1:
            time.sleep(0.5)
        order.append(f"{rank} came")
        rendezvous.wait_for_all("loaded")
        order.append("through")
        return rendezvous  # rank 0's holds the store, which the others still read

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank_main, range(2)))
    assert order == ["0 came", "1 came", "through", "through"]
