"""The copy plan against pools filled with (layer, kind, head, token) codes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interlock.kv.transfer.base import Pieces, TransferError
from interlock.kv.transfer.copies import CopyPlanner, Span, head_routes
from interlock.kv.transfer.layout import CacheLayout, refuse_different
from interlock.kv.transfer.shared_memory.pools import SharedReceiver, SharedSender
from interlock.parallel.sharding import kv_heads_of
from tests.kv.transfer.layouts import code, layout, pools, rows


def page_table(each: CacheLayout, tokens: int, seed: int) -> np.ndarray:
    count = -(-tokens // each.page_size)
    return np.array(random.Random(seed).sample(range(40), count), dtype=np.int32)


def filled(each: CacheLayout, rank: int, tokens: int, tables: dict[bool, np.ndarray]) -> list[torch.Tensor]:
    buffers = pools(each)
    for index, (layer, kind) in enumerate(each.buffers):
        table, view = tables[layer.window is not None], rows(each, buffers, index, rank)
        for local, head in enumerate(kv_heads_of(layer.kv_heads, each.attn_tp, rank)):
            for token in range(tokens):
                row = int(table[token // each.page_size]) * each.page_size + token % each.page_size
                view[row, local] = code(layer.layer, kind, head, token)
    return buffers


def lines(pieces: Pieces) -> Iterator[tuple[int, int, int, int, int]]:
    """(source buffer, source, target buffer, target, length) of every row of every piece."""
    columns = (getattr(pieces, each.name).tolist() for each in fields(pieces))
    for b, o, c, t, n, count, step, other in zip(*columns, strict=True):
        for row in range(count):
            yield b, o + row * step, c, t + row * other, n


def transfer(prefill: CacheLayout, decode: CacheLayout, tokens: int, tail: int) -> None:
    """Move tokens 0:n of full layers and tail:n of sliding ones; every rank must hold exactly its heads."""
    mine = {False: page_table(prefill, tokens, 1), True: page_table(prefill, tokens, 2)}
    theirs = {False: page_table(decode, tokens, 3), True: page_table(decode, tokens, 4)}
    senders = [filled(prefill, rank, tokens, mine) for rank in range(prefill.attn_tp)]
    receivers = [pools(decode) for _ in range(decode.attn_tp)]
    moved = 0
    for s, r in itertools.product(range(prefill.attn_tp), range(decode.attn_tp)):
        pieces = CopyPlanner(prefill, decode, sender=s, receiver=r).pieces(
            Span(0, tokens, mine[False], theirs[False]), Span(tail, tokens, mine[True], theirs[True])
        )
        pieces.check(prefill.sizes(), decode.sizes())
        for b, o, c, t, n in lines(pieces):
            receivers[r][c][t : t + n] = senders[s][b][o : o + n]
        moved += pieces.nbytes
    wanted = 0
    for rank, index in itertools.product(range(decode.attn_tp), range(len(decode.buffers))):
        layer, kind = decode.buffers[index]
        view = rows(decode, receivers[rank], index, rank)
        table, first = theirs[layer.window is not None], 0 if layer.window is None else tail
        expected = torch.zeros_like(view)
        for local, head in enumerate(kv_heads_of(layer.kv_heads, decode.attn_tp, rank)):
            for token in range(first, tokens):
                row = int(table[token // decode.page_size]) * decode.page_size + token % decode.page_size
                expected[row, local] = code(layer.layer, kind, head, token)
        assert torch.equal(view, expected)
        wanted += int((expected != 0).sum()) * 4
    assert moved == wanted, "bytes are moved once for each head that is needed"


@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_every_rank_gets_exactly_its_heads(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Case H01."""
    prefill, decode = (layout(attn_tp=tp, heads=heads, kinds="wf") for tp in sizes)
    transfer(prefill, decode, tokens=9, tail=3)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (16, 24)])
def test_page_sizes_may_differ(tokens: int, sizes: tuple[int, int]) -> None:
    """Case H10."""
    prefill, decode = (layout(page_size=size, kinds="fw", heads=(1, 1)) for size in sizes)
    transfer(prefill, decode, tokens=tokens, tail=max(0, tokens - 8))


def test_layers_are_found_by_their_number() -> None:
    """Case H12: the sender holds the layers in another order, and in the end one is missing."""
    decode = layout(kinds="fwwf")
    mixed = layout(kinds="wffw", layers=(2, 0, 3, 1))
    refuse_different(mixed, decode)
    transfer(mixed, decode, tokens=11, tail=4)
    with pytest.raises(TransferError, match="num-hidden-layers"):
        refuse_different(layout(kinds="fww"), decode)


@given(
    start=st.integers(0, 60),
    count=st.integers(0, 60),
    sizes=st.tuples(st.sampled_from((1, 3, 4, 16)), st.sampled_from((1, 3, 4, 16))),
)
def test_a_span_covers_each_token_once(start: int, count: int, sizes: tuple[int, int]) -> None:
    prefill, decode = (layout(page_size=size, kinds="f", pages=130) for size in sizes)
    end = start + count
    tables = [
        np.array(random.Random(7).sample(range(130), -(-end // size)), dtype=np.int32) for size in sizes
    ]
    pieces = CopyPlanner(prefill, decode, sender=0, receiver=0).pieces(Span(start, end, *tables), None)
    pieces.check(prefill.sizes(), decode.sizes())
    assert pieces.nbytes == count * sum(prefill.row_bytes(*each) for each in prefill.buffers)
    for buffer in range(len(decode.buffers)):
        row = decode.row_bytes(*decode.buffers[buffer])
        spans = [(t // row, n // row) for _, _, b, t, n in lines(pieces) if b == buffer]
        touched = sorted(r for at, n in spans for r in range(at, at + n))
        expected = [int(tables[1][t // sizes[1]]) * sizes[1] + t % sizes[1] for t in range(start, end)]
        assert touched == sorted(expected)


def test_pages_that_do_not_exist_are_refused() -> None:
    each = layout(kinds="f", pages=4)
    plan = CopyPlanner(each, each, sender=0, receiver=0)
    good = np.array([0, 1, 2], dtype=np.int32)
    for bad in (np.array([0, -1, 1], dtype=np.int32), np.array([0, 4, 1], dtype=np.int32), good[:2]):
        with pytest.raises(TransferError):
            plan.pieces(Span(0, 12, good, bad), None)
        with pytest.raises(TransferError):
            plan.pieces(Span(0, 12, bad, good), None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": "bfloat16"}, "kv-cache-dtype"),
        ({"heads": (4, 4)}, "kv_heads of layer 0"),
        ({"kinds": "wwwf"}, "window of layer 0"),
    ],
)
def test_a_difference_is_named_with_both_values(change: dict[str, object], name: str) -> None:
    """Case H02, at the hand-shake."""
    with pytest.raises(TransferError, match=name):
        refuse_different(layout(), layout(**change))  # type: ignore[arg-type]


def test_heads_that_do_not_map_are_refused() -> None:
    with pytest.raises(TransferError, match="3 attention-TP ranks"):
        layout(attn_tp=3).check()
    assert [route.heads for route in head_routes(4, 2, 4)] == [range(i, i + 1) for i in range(4)]


def test_shared_memory_writes_into_the_pools_of_the_receiver() -> None:
    each = layout()
    receiver, sender = SharedReceiver(""), SharedSender("")
    theirs = receiver.allocate(each.sizes())
    table = {False: page_table(each, 30, 1), True: page_table(each, 30, 2)}
    mine = filled(each, 0, 30, table)
    sender.register(mine)
    try:
        number = sender.connect(receiver.register(theirs), each.sizes())
        with pytest.raises(TransferError, match="other sizes"):
            sender.connect(receiver.register(theirs), [1])
        spans = (Span(0, 30, table[False], table[False]), Span(0, 30, table[True], table[True]))
        sender.write(number, CopyPlanner(each, each, sender=0, receiver=0).pieces(*spans))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    finally:
        sender.close()
        receiver.close()
