"""Transfers through staging memory: whole, refused, cut off, late; over each carrier and over doubles."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import StartupError
from interlock.kv.transfer.base import KVReceiver, KVSender, Pieces, TransferError
from interlock.kv.transfer.copies import CopyPlanner, Span
from interlock.kv.transfer.mooncake import ends as mooncake
from interlock.kv.transfer.nixl import ends as nixl
from interlock.kv.transfer.registry import library_environment, transfer_backends
from interlock.kv.transfer.shared_memory.carrier import SharedLanding, SharedSource, SharedTarget
from interlock.kv.transfer.staged import receiver as receiving
from interlock.kv.transfer.staged import sender as sending
from interlock.kv.transfer.staged.channel import Part, Where
from interlock.kv.transfer.staged.mover import Blocks, CpuMover, gather_indexed, scatter_indexed
from interlock.kv.transfer.staged.parts import parts
from interlock.kv.transfer.staged.receiver import StagedReceiver
from interlock.kv.transfer.staged.sender import StagedSender
from interlock.plugins import load_symbol
from tests.kv.transfer.backends import NAMES, need
from tests.kv.transfer.doubles import MooncakeDouble, Moves, NixlDouble
from tests.kv.transfer.layouts import layout, pools
from tests.kv.transfer.test_copies import lines

HOST = "127.0.0.1"
SIZES = [30_000, 12_345]


def some_pieces(seed: int, count: int) -> Pieces:
    """Strided and plain pieces between two buffers each; their targets lie apart."""
    rng, at, columns = random.Random(seed), [0, 0], []
    for _ in range(count):
        length, rows = rng.choice([1, 8, 24, 64, 100, 700]), rng.choice([1, 1, 2, 5])
        step, other = length + rng.choice([0, 0, 8, 3]), length + rng.choice([0, 8, 5])
        buffer, target = rng.randrange(2), rng.randrange(2)
        if at[target] + rows * other > SIZES[target]:
            continue
        start = rng.randrange(SIZES[buffer] - rows * step)
        columns.append((buffer, start, target, at[target], length, rows, step, other))
        at[target] += rows * other
    table = np.array(columns, dtype=np.int64).reshape(-1, 8)
    return Pieces(*(np.ascontiguousarray(column) for column in table.T))


def random_buffers() -> list[torch.Tensor]:
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]


def expected(mine: list[torch.Tensor], pieces: Pieces) -> list[torch.Tensor]:
    theirs = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    for b, o, c, t, n in lines(pieces):
        theirs[c][t : t + n] = mine[b][o : o + n]
    return theirs


Tensors = list[torch.Tensor]


@contextmanager
def ends(sender: KVSender, receiver: KVReceiver) -> Iterator[tuple[Tensors, Tensors, int]]:
    """Buffers of both sides and the receiver's number."""
    try:
        theirs = receiver.allocate(SIZES)
        mine = random_buffers()
        sender.register(mine)
        yield mine, theirs, sender.connect(receiver.register(theirs), SIZES)
    finally:
        sender.close()
        receiver.close()


def staged(timeout: float = 5.0, slot_bytes: int = 4096) -> tuple[StagedSender, StagedReceiver]:
    target = SharedTarget(pinned=False)
    return (
        StagedSender(SharedSource(), timeout=timeout, slot_bytes=slot_bytes),
        StagedReceiver(target, HOST, timeout=timeout),
    )


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 20), limit=st.sampled_from([700, 1000, 5000]))
def test_parts_are_the_same_bytes_in_the_same_order(seed: int, count: int, limit: int) -> None:
    pieces = some_pieces(seed, count)
    cut = list(parts(pieces, limit, 600))
    assert all(0 < each.nbytes <= limit for each in cut)
    mine = random_buffers()
    theirs = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    for each in cut:
        for b, o, c, t, n in lines(each):
            theirs[c][t : t + n] = mine[b][o : o + n]
    assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
    assert sum(each.nbytes for each in cut) == pieces.nbytes


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 20))
def test_indexed_copies_of_a_device_are_the_plain_ones(seed: int, count: int) -> None:
    """What a GPU does, in torch on the CPU, against the native copy."""
    pieces, mine = some_pieces(seed, count), random_buffers()
    rooms = [torch.zeros(pieces.nbytes + 64, dtype=torch.uint8) for _ in range(2)]
    CpuMover(mine).gather(Blocks.source(pieces), rooms[0])
    gather_indexed(mine, Blocks.source(pieces), rooms[1])
    assert torch.equal(rooms[0], rooms[1])
    theirs = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    scatter_indexed(theirs, Blocks.target(pieces), rooms[1])
    assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_moves_random_pieces(name: str) -> None:
    need(name)
    backend = transfer_backends().get(name)
    sender, receiver = (load_symbol(path)(HOST, timeout=10.0) for path in (backend.sender, backend.receiver))
    with ends(sender, receiver) as (mine, theirs, number):
        for seed in range(3):
            for buffer in theirs:
                buffer.zero_()
            pieces = some_pieces(seed, 40)
            sender.write(number, pieces)
            assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_backend_moves_full_and_window_pages_of_any_tp(name: str, prefill_tp: int, decode_tp: int) -> None:
    """Cases H01 and H12: every rank pair writes, every byte that is due arrives."""
    need(name)
    backend = transfer_backends().get(name)
    prefill, decode = layout(attn_tp=prefill_tp), layout(attn_tp=decode_tp)
    rng = random.Random(0)
    tables = [np.array(rng.sample(range(40), 8), dtype=np.int32) for _ in range(4)]
    spans = Span(2, 30, tables[0], tables[1]), Span(20, 30, tables[2], tables[3])
    receivers = [load_symbol(backend.receiver)(HOST, timeout=10.0) for _ in range(decode_tp)]
    theirs = [each.allocate(decode.sizes()) for each in receivers]
    due = [pools(decode) for _ in receivers]
    descriptions = [each.register(buffers) for each, buffers in zip(receivers, theirs, strict=True)]
    senders: list[KVSender] = []
    try:
        for rank in range(prefill_tp):
            sender = load_symbol(backend.sender)(HOST, timeout=10.0)
            senders.append(sender)
            mine = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in prefill.sizes()]
            sender.register(mine)
            for other in range(decode_tp):
                planner = CopyPlanner(prefill, decode, sender=rank, receiver=other)
                if planner.is_empty:
                    continue
                pieces = planner.pieces(*spans)
                sender.write(sender.connect(descriptions[other], decode.sizes()), pieces)
                for b, o, c, t, n in lines(pieces):
                    due[other][c][t : t + n] = mine[b][o : o + n]
        for got, expect in zip(theirs, due, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expect, strict=True))
    finally:
        for each in (*senders, *receivers):
            each.close()


Library = tuple[Moves, Callable[[], tuple[KVSender, KVReceiver]]]


@pytest.fixture(params=["mooncake", "nixl"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A double of the library, and our two ends over it."""
    moves = Moves()
    if request.param == "mooncake":
        MooncakeDouble(moves).install(monkeypatch)
        pair = mooncake.MooncakeSender, mooncake.MooncakeReceiver
    else:
        NixlDouble(moves).install(monkeypatch)
        pair = nixl.NixlSender, nixl.NixlReceiver
    return moves, lambda: (pair[0](HOST, timeout=5.0), pair[1](HOST, timeout=5.0))


def test_calls_keep_to_the_library_s_interface(library: Library) -> None:
    """Over the double: reads stay in registered memory, only staging is registered, all is given up."""
    moves, make = library
    sender, receiver = make()
    with ends(sender, receiver) as (mine, theirs, number):
        for seed in range(4):
            pieces = some_pieces(seed, 40)
            for buffer in theirs:
                buffer.zero_()
            sender.write(number, pieces)
            assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
    assert moves.calls.count("initialize") == 2
    assert moves.calls.count("register") == moves.calls.count("unregister") > 1


def test_a_read_that_fails_is_an_error_and_the_next_write_begins_anew(library: Library) -> None:
    moves, make = library
    sender, receiver = make()
    with ends(sender, receiver) as (mine, theirs, number):
        pieces = some_pieces(1, 40)
        moves.fail_after = 0
        with pytest.raises(TransferError, match="did not take the pages"):
            sender.write(number, pieces)
        assert not any(buffer.any() for buffer in theirs), "a part that did not arrive is on no page"
        moves.fail_after = 1 << 30
        sender.write(number, pieces)
        assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
    lost = moves.calls.count("register") - moves.calls.count("unregister")
    assert lost == 1, "memory that a late read may still write to stays"


def test_reads_over_ended_connections_are_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake keeps four connections to a peer; each may have ended since it was used last."""
    moves = Moves()
    MooncakeDouble(moves).install(monkeypatch)
    sender, receiver = mooncake.MooncakeSender(HOST), mooncake.MooncakeReceiver(HOST)
    with ends(sender, receiver) as (mine, theirs, number):
        pieces = some_pieces(1, 40)
        for broken in (4, 1):
            moves.broken = broken
            sender.write(number, pieces)
            assert moves.broken == 0
            assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
        moves.broken = 5
        with pytest.raises(TransferError, match="has failed"):
            sender.write(number, pieces)


def test_connections_of_mooncake_that_were_cut_are_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library itself: all that it keeps open is shut down between two writes."""
    need("mooncake")
    for name, value in transfer_backends().get("mooncake").environment:
        monkeypatch.setenv(name, value)
    failed = _failed_reads(monkeypatch)
    before = _connections()
    sender, receiver = mooncake.MooncakeSender(HOST), mooncake.MooncakeReceiver(HOST)
    with ends(sender, receiver) as (mine, theirs, number):
        own = _connections()
        pieces = some_pieces(1, 40)
        sender.write(number, pieces)
        kept = _connections() - own - before
        assert kept, "the library keeps connections open"
        for descriptor in kept:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        for buffer in theirs:
            buffer.zero_()
        sender.write(number, pieces)
        assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
    assert failed


def _connections() -> set[int]:
    """Descriptors of this process's established TCP connections."""
    found = psutil.Process().net_connections("tcp")
    return {each.fd for each in found if each.status == psutil.CONN_ESTABLISHED and each.fd >= 0}


def _failed_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    read = mooncake.MooncakeLanding._read

    def watched(self: mooncake.MooncakeLanding, memory: torch.Tensor, source: int, deadline: float) -> str:
        problem = read(self, memory, source, deadline)
        if problem:
            seen.append(problem)
        return problem

    monkeypatch.setattr(mooncake.MooncakeLanding, "_read", watched)
    return seen


@pytest.mark.parametrize("module", ["mooncake.engine", "nixl_cu13._api"])
def test_a_library_that_cannot_be_loaded_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    start, words = (
        (lambda: mooncake.MooncakeReceiver(HOST), "libibverbs1")
        if module.startswith("mooncake")
        else (lambda: nixl.NixlReceiver(HOST), "pip install nixl-cu13")
    )
    with pytest.raises(StartupError, match=words):
        start()


def test_many_slots_and_any_slot_size_give_the_same_bytes() -> None:
    for slot_bytes in (1000, 4096, 1 << 20):
        sender, receiver = staged(slot_bytes=slot_bytes)
        with ends(sender, receiver) as (mine, theirs, number):
            pieces = some_pieces(5, 60)
            sender.write(number, pieces)
            assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))


def test_a_small_write_goes_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that gathering, moving and scattering overlap in it."""
    seen = _answers(monkeypatch)
    monkeypatch.setattr(sending, "GRAIN_BYTES", 256)
    sender, receiver = staged(slot_bytes=1 << 20)
    with ends(sender, receiver) as (mine, theirs, number):
        pieces = some_pieces(5, 60)
        sender.write(number, pieces)
        assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
    assert len(seen) >= sending.SLOTS


def test_a_library_s_variables_are_set_where_the_user_did_not() -> None:
    declared = dict(transfer_backends().get("mooncake").environment)
    assert library_environment("mooncake", {"A": "1"}) == declared
    assert set(library_environment("mooncake", {"MC_TCP_SLICE_SIZE": "7"})) == set(declared) - {
        "MC_TCP_SLICE_SIZE"
    }
    assert library_environment("", {}) == {}


def test_two_senders_write_to_one_receiver_at_once() -> None:
    _, receiver = staged()
    theirs = receiver.allocate([SIZES[0], SIZES[0]])
    description = receiver.register(theirs)
    senders = [StagedSender(SharedSource(), timeout=5.0, slot_bytes=1000) for _ in range(2)]
    mine = [torch.randint(0, 256, (SIZES[0],), dtype=torch.uint8) for _ in senders]

    def run(index: int) -> None:
        sender = senders[index]
        sender.register([mine[index]])
        number = sender.connect(description, [SIZES[0], SIZES[0]])
        column = np.array([0], dtype=np.int64)
        size = np.array([SIZES[0]], dtype=np.int64)
        sender.write(number, Pieces(column, column, column + index, column, size, column + 1, size, size))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    try:
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    finally:
        for each in (*senders, receiver):
            each.close()


def test_a_stranger_without_the_secret_is_let_in_nowhere() -> None:
    sender, receiver = staged()
    theirs = receiver.allocate(SIZES)
    where = msgspec.msgpack.decode(receiver.register(theirs), type=Where)
    sender.register(random_buffers())
    try:
        with pytest.raises(TransferError, match="secret"):
            sender.connect(msgspec.msgpack.encode(msgspec.structs.replace(where, secret=b"x" * 16)), SIZES)
        with pytest.raises(TransferError, match="other sizes"):
            sender.connect(msgspec.msgpack.encode(where), [1, 2])
        with pytest.raises(TransferError, match="describes itself"):
            sender.connect(b"nothing", SIZES)
    finally:
        sender.close()
        receiver.close()


def one_block(*block: int) -> bytes:
    """Columns of (buffer, start, length, rows, stride)."""
    return np.array(block, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    ("start", "nbytes", "columns", "words"),
    [
        (0, 8, one_block(0, 99_999, 8, 1, 8), "leaves its target buffer"),
        (0, 8, one_block(2, 0, 8, 1, 8), "target buffer 2"),
        (0, 9, one_block(0, 0, 8, 1, 8), "are sent"),
        (1 << 40, 8, one_block(0, 0, 8, 1, 8), "staging"),
        (-8, 8, one_block(0, 0, 8, 1, 8), "staging"),
        (0, 8, b"odd", "five columns"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_written(
    start: int, nbytes: int, columns: bytes, words: str
) -> None:
    """The receiver believes nothing that a sender says."""
    sender, receiver = staged()
    with ends(sender, receiver) as (_, theirs, number):
        channel = sender._targets[number].channels[0]
        channel.send(Part(start=start, nbytes=nbytes, columns=columns))
        answer = channel.receive(5.0)
        assert words in answer.error  # type: ignore[union-attr]
        assert not any(buffer.any() for buffer in theirs)


def test_a_part_that_comes_late_is_not_written_but_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "LEASE_SECONDS", 0.05)
    fetch, slow = SharedLanding.fetch, [0.2, 0.0, 0.2]

    def slowly(self: SharedLanding, start: int, nbytes: int) -> torch.Tensor:
        time.sleep(slow.pop() if slow else 0.0)
        return fetch(self, start, nbytes)

    monkeypatch.setattr(SharedLanding, "fetch", slowly)
    answers = _answers(monkeypatch)
    sender, receiver = staged(slot_bytes=1000)
    with ends(sender, receiver) as (mine, theirs, number):
        pieces = some_pieces(2, 40)
        sender.write(number, pieces)
        assert all(torch.equal(a, b) for a, b in zip(theirs, expected(mine, pieces), strict=True))
    assert answers.count(True) == 2


def _answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each part that is scattered or not: whether it was late."""
    seen: list[bool] = []
    scatter = StagedReceiver._scatter

    def watched(self: StagedReceiver, *args: object) -> object:
        answer = scatter(self, *args)  # type: ignore[arg-type]
        seen.append(answer.late)
        return answer

    monkeypatch.setattr(StagedReceiver, "_scatter", watched)
    return seen


@pytest.mark.parametrize("how", ["cut", "timeout"])
def test_a_part_whose_sender_has_gone_is_not_written(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may belong to somebody else by then. ``cut`` also ends the waiting of ``write`` at once."""
    going, fetched = threading.Event(), threading.Event()
    fetch = SharedLanding.fetch

    def held(self: SharedLanding, start: int, nbytes: int) -> torch.Tensor:
        fetched.set()
        assert going.wait(10)
        return fetch(self, start, nbytes)

    monkeypatch.setattr(SharedLanding, "fetch", held)
    sender, receiver = staged(timeout=0.3 if how == "timeout" else 30.0)
    with ends(sender, receiver) as (_, theirs, number):
        errors: list[TransferError] = []

        def write() -> None:
            try:
                sender.write(number, some_pieces(2, 3))
            except TransferError as error:
                errors.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        assert fetched.wait(10)
        if how == "cut":
            sender.cut(number)
        thread.join(10)
        assert not thread.is_alive()
        assert len(errors) == 1
        going.set()
        receiver.close()
        assert not any(buffer.any() for buffer in theirs)
        if how == "cut":
            with pytest.raises(TransferError, match="gone"):
                sender.write(number, some_pieces(2, 3))


def test_a_receiver_that_is_gone_is_an_error_that_names_it() -> None:
    sender, receiver = staged()
    with ends(sender, receiver) as (_, _, number):
        sender.write(number, some_pieces(2, 3))
        receiver.close()
        with pytest.raises(TransferError, match=r"127\.0\.0\.1:[0-9]+"):
            sender.write(number, some_pieces(2, 3))
        with pytest.raises(TransferError, match="cannot be reached"):
            sender.write(number, some_pieces(2, 3))
