"""What the transfer of keys and values between a prefill and a decode server delivers.

    python benchmarks/kv_transfer.py speed [--backends shared_memory,mooncake,nixl] [--mib 256] [--out FILE]

``speed``: bytes a second of ``KVSender.write`` into another process, for the pieces that the copy planner
makes of random pages: equal TP sizes (whole rows), and unequal ones (a part of every row, scattered). Beside
each the measure of the same moment: one ``memcpy`` of as many bytes for ``shared_memory``, loopback TCP
between two processes for the others, on a GPU a copy to page-locked memory. Rates are those of the best
repeat, and ``ratio`` is theirs; ``ratio_of_medians`` is less at the mercy of one quiet moment. Every byte is
checked at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from interlock.kv.transfer.base import KVSender, Pieces
from interlock.kv.transfer.copies import CopyPlanner, Span
from interlock.kv.transfer.layout import CacheLayout, LayerLayout
from interlock.kv.transfer.registry import library_environment, transfer_backends
from interlock.plugins import load_symbol

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Shape:
    """Attention-TP sizes of both servers."""

    name: str
    prefill: int
    decode: int


SHAPES = (
    Shape("equal TP", 1, 1),
    Shape("TP 2 to 1", 2, 1),
    Shape("TP 1 to 2", 1, 2),
    Shape("TP 4 to 1", 4, 1),
)


def layout(tp: int, args: argparse.Namespace) -> CacheLayout:
    layers = tuple(LayerLayout(i, None, 8, args.k_width, args.v_width) for i in range(args.layers))
    row = 8 * (args.k_width + args.v_width) * 2 * args.layers
    pages = -(-(args.mib << 20) // (row * args.page_size)) + 1
    return CacheLayout(
        model="m",
        dtype="bfloat16",
        page_size=args.page_size,
        attn_tp=tp,
        full_pages=pages,
        window_pages=0,
        window=None,
        layers=layers,
    )


def pieces_of(shape: Shape, args: argparse.Namespace) -> tuple[CacheLayout, CacheLayout, Pieces]:
    """All tokens of the pool, from and to pages in random order."""
    prefill, decode = layout(shape.prefill, args), layout(shape.decode, args)
    rng = np.random.default_rng(0)
    source, target = (rng.permutation(prefill.full_pages).astype(np.int32) for _ in range(2))
    tokens = prefill.full_pages * args.page_size
    span = Span(0, tokens, source, target)
    return prefill, decode, CopyPlanner(prefill, decode, sender=0, receiver=0).pieces(span, None)


def receive(name: str, device: str, pipe: Connection) -> None:
    """The decode side, in a process of its own: a receiver for each list of sizes, until None comes."""
    while sizes := pipe.recv():
        receive_once(name, device, sizes, pipe)


def receive_once(name: str, device: str, sizes: Sequence[int], pipe: Connection) -> None:
    """Answers each message with a digest of every buffer, until one is False."""
    receiver = load_symbol(transfer_backends().get(name).receiver)(HOST)
    if device == "cpu":
        buffers = receiver.allocate(sizes)
    else:
        buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    pipe.send(receiver.register(buffers))
    while pipe.recv():
        pipe.send([digest(each) for each in buffers])
    receiver.close()


def digest(buffer: torch.Tensor) -> int:
    return zlib.crc32(memoryview(buffer.cpu().numpy()))


def expected(mine: Sequence[torch.Tensor], pieces: Pieces, sizes: Sequence[int]) -> list[int]:
    """What ``receive`` must say, with nothing but slices."""
    theirs = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for b, o, c, t, n, rows, step, other in zip(
        *(getattr(pieces, name).tolist() for name in Pieces.__slots__), strict=True
    ):
        source = mine[b].as_strided((rows, n), (step, 1), o)
        theirs[c].as_strided((rows, n), (other, 1), t).copy_(source)
    return [digest(each) for each in theirs]


Ends = tuple[KVSender, int, Callable[[], Any]]


@contextmanager
def decode_side(name: str, device: str) -> Iterator[Connection]:
    """A process that runs ``receive``."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=receive, args=(name, device, theirs))
    child.start()
    try:
        yield pipe
    finally:
        pipe.send(None)
        child.join(10)


@contextmanager
def ends(
    name: str, device: str, mine: Sequence[torch.Tensor], sizes: Sequence[int], pipe: Connection
) -> Iterator[Ends]:
    """A sender, the number of its receiver, and what asks for the receiver's digests."""
    pipe.send(sizes)
    sender = load_symbol(transfer_backends().get(name).sender)(HOST)
    try:
        sender.register([each.to(device) for each in mine])
        number = sender.connect(pipe.recv(), sizes)

        def ask() -> Any:
            pipe.send(True)
            return pipe.recv()

        yield sender, number, ask
    finally:
        pipe.send(False)
        sender.close()


def timed(works: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each, in turns: others on the machine hurt all of them alike."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, taken in zip(works, times, strict=True):
            begun = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begun)
    return times


@contextmanager
def memcpy(nbytes: int) -> Iterator[Callable[[], object]]:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    yield lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


@contextmanager
def device_to_host(nbytes: int) -> Iterator[Callable[[], object]]:
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    yield lambda: target.copy_(source)


def drain(pipe: Connection, nbytes: int) -> None:
    """Reads ``nbytes`` again and again and answers each time."""
    with socket.create_server((HOST, 0)) as server:
        pipe.send(server.getsockname()[1])
        stream, _ = server.accept()
        buffer = memoryview(bytearray(nbytes))
        with stream:
            while True:
                got = 0
                while got < nbytes:
                    count = stream.recv_into(buffer[got:], min(nbytes - got, 1 << 20))
                    if not count:
                        return
                    got += count
                stream.sendall(b"x")


@contextmanager
def loopback(nbytes: int) -> Iterator[Callable[[], object]]:
    """TCP over the loopback interface: a process sends, another receives into memory and says so."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=drain, args=(theirs, nbytes))
    child.start()
    data = bytes(nbytes)
    with socket.create_connection((HOST, pipe.recv())) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def once() -> None:
            stream.sendall(data)
            stream.recv(1)

        yield once
    child.join(10)


def measured(name: str, shape: Shape, pipe: Connection, args: argparse.Namespace) -> dict[str, object]:
    """One row: the backend's rate for a shape, and that of what it is measured by."""
    title, reference = ("memcpy", memcpy) if name == "shared_memory" else ("loopback TCP", loopback)
    if args.device != "cpu":
        title, reference = "pinned device to host", device_to_host
    prefill, decode, pieces = pieces_of(shape, args)
    mine = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in prefill.sizes()]
    with (
        reference(pieces.nbytes) as plain,
        ends(name, args.device, mine, decode.sizes(), pipe) as (sender, number, ask),
    ):
        works = [plain, partial(sender.write, number, pieces)]
        due, delivered = timed(works, args.repeats)
        if ask() != expected(mine, pieces, decode.sizes()):
            raise SystemExit(f"{name}, {shape.name}: not the bytes that were sent")
    return {
        "backend": name,
        "shape": shape.name,
        "mib": round(pieces.nbytes / (1 << 20)),
        "pieces": len(pieces),
        "row_bytes": int(pieces.length.min()),
        "gb_per_s": round(pieces.nbytes / min(delivered) / 1e9, 2),
        "reference": title,
        "reference_gb_per_s": round(pieces.nbytes / min(due) / 1e9, 2),
        "ratio": round(min(due) / min(delivered), 3),
        "ratio_of_medians": round(statistics.median(due) / statistics.median(delivered), 3),
    }


def speed(args: argparse.Namespace) -> None:
    rows = []
    wanted = args.shapes.split(",")
    for name in args.backends.split(","):
        os.environ.update(library_environment(name, os.environ))
        with decode_side(name, args.device) as pipe:
            for shape in SHAPES:
                if shape.name in wanted:
                    rows.append(measured(name, shape, pipe, args))
                    print(json.dumps(rows[-1]), flush=True)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    first = verbs.add_parser("speed")
    first.add_argument("--backends", default="shared_memory")
    first.add_argument("--device", default="cpu")
    first.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    first.add_argument("--mib", type=int, default=256)
    first.add_argument("--repeats", type=int, default=15)
    first.add_argument("--layers", type=int, default=8)
    first.add_argument("--page-size", type=int, default=64)
    first.add_argument("--k-width", type=int, default=192)
    first.add_argument("--v-width", type=int, default=128)
    first.add_argument("--out", default="", help="JSON lines, one a row")
    first.set_defaults(run=speed)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
