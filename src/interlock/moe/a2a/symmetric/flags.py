"""How ranks wait for each other on the device: flags in each other's memory, and an error instead of a hang.

A flag holds the number of the last step (*epoch*) in which its owner reached the stage. Epochs are counted in
device memory, so a captured graph goes on counting. Where ranks share a GPU one program of a launch waits:
they must not fill it with waiting programs, or the one that they wait for would find no room.

State int32: epoch, tickets of rows, tickets of results, failed, tickets of a dispatch. Notice int64 (host
memory that the device writes): code, rank (or token), epoch, nanoseconds waited (or expert), rows received.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

FLAGS = tl.constexpr(0)
FLAG_WORDS = tl.constexpr(32)
COUNTS_STAGE, ROWS_STAGE, RESULTS_STAGE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EPOCH, FAILED = tl.constexpr(0), tl.constexpr(3)
CODE, RANK, STEP, WAITED, TOTAL = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
    tl.constexpr(3),
    tl.constexpr(4),
)
BAD_ID, OVERFLOW = tl.constexpr(4), tl.constexpr(5)
"""Codes of a notice; 1 + stage is the code of a peer that came too late."""


@triton.jit
def address_of(peers, section: tl.constexpr, ranks, rank):
    """int64, where a section of a rank's region lies in this rank's address space."""
    return tl.load(peers + section * ranks + rank)


@triton.jit
def fail(state, notice, code, rank, detail):
    """Say what went wrong first, for the host; from now on this rank neither sends nor waits."""
    if tl.atomic_cas(state + FAILED, 0, 1) == 0:
        tl.store(notice + RANK, rank.to(tl.int64))
        tl.store(notice + STEP, tl.load(state + EPOCH).to(tl.int64))
        tl.store(notice + WAITED, detail.to(tl.int64))
        tl.store(notice + CODE, code)


@triton.jit
def signal(peers, rank, ranks, stage: tl.constexpr, epoch, failed, width: tl.constexpr):
    """Raise this rank's flag at every peer. Who sees it sees all that this program saw or wrote before."""
    tl.debug_barrier()
    peer = tl.arange(0, width)
    mine = (peer < ranks) & (failed == 0)
    base = address_of(peers, FLAGS, ranks, peer * (peer < ranks)).to(tl.pointer_type(tl.int32))
    where = base + (stage * ranks + rank) * FLAG_WORDS
    tl.atomic_xchg(where, tl.zeros([width], tl.int32) + epoch, mask=mine, sem="release", scope="sys")


@triton.jit
def wait(
    peers, rank, ranks, stage: tl.constexpr, epoch, state, notice, limit, failed,
    width: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """Return when all peers have raised their flags: 0. After ``limit`` ns, name the first late one: 1.

    Without a clock (the interpreter) the limit is a number of looks.
    """
    peer = tl.arange(0, width)
    mine = peer < ranks
    base = address_of(peers, FLAGS, ranks, rank).to(tl.pointer_type(tl.int32))
    where = base + (stage * ranks + peer) * FLAG_WORDS
    nothing = tl.zeros([width], tl.int32)
    waited = tl.zeros([], tl.int64)
    begun = waited
    if clocked:
        begun = globaltimer()
    pending = ranks * (1 - failed)
    while pending > 0:
        seen = tl.atomic_add(where, nothing, mask=mine, sem="acquire", scope="sys")
        late = mine & ((seen - epoch) < 0)
        pending = tl.sum(late.to(tl.int32), axis=0)
        if clocked:
            waited = globaltimer() - begun
        else:
            waited += 1
        if (pending > 0) & (waited >= limit):
            fail(state, notice, stage + 1, tl.min(tl.where(late, peer, width), axis=0), waited)
            failed = failed * 0 + 1
            pending = pending * 0
    tl.debug_barrier()
    return failed


@triton.jit
def _look(where, clocked: tl.constexpr):
    """Flags, and with them all that their owners wrote before."""
    if clocked:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
        )
    else:  # noqa: RET505
        return tl.load(where, volatile=True)


@triton.jit
def wait_for(
    where, peer, mine, code: tl.constexpr, epoch, state, notice, limit, failed,
    width: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """``wait`` for the flags ``where`` of ``peer``, by loads alone, where all programs of a launch wait."""
    waited = tl.zeros([], tl.int64)
    begun = waited
    if clocked:
        begun = globaltimer()
    pending = 1 - failed
    while pending > 0:
        late = mine & ((_look(where, clocked) - epoch) < 0)
        pending = tl.max(late.to(tl.int32), axis=0)
        if pending > 0:
            if clocked:
                waited = globaltimer() - begun
            else:
                waited += 1
            if waited >= limit:
                fail(state, notice, code, tl.min(tl.where(late, peer, width), axis=0), waited)
                failed = failed * 0 + 1
                pending = pending * 0
    tl.debug_barrier()
    return failed


@triton.jit
def meet(
    peers, rank, ranks, state, notice, limit, stage: tl.constexpr, code: tl.constexpr,
    width: tl.constexpr, signals: tl.constexpr, waits: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """Tell every rank that this one has reached a stage, and wait until all have."""
    epoch, failed = tl.load(state + EPOCH), tl.load(state + FAILED)
    if signals:
        signal(peers, rank, ranks, stage, epoch, failed, width)
    if waits:
        peer = tl.arange(0, width)
        mine = peer < ranks
        base = address_of(peers, FLAGS, ranks, rank).to(tl.pointer_type(tl.int32))
        where = base + (stage * ranks + tl.where(mine, peer, 0)) * FLAG_WORDS
        wait_for(where, peer, mine, code, epoch, state, notice, limit, failed, width, clocked)


@triton.jit
def finish(
    peers, rank, ranks, stage: tl.constexpr, state, notice, limit,
    width: tl.constexpr, waits: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """The last program of the launch to get here raises the flags, and waits for those of the peers."""
    epoch = tl.load(state + EPOCH)
    failed = tl.load(state + FAILED)
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.debug_barrier()
    if tl.atomic_add(state + stage, 1, sem="acq_rel", scope="sys") == programs - 1:
        tl.store(state + stage, 0)
        signal(peers, rank, ranks, stage, epoch, failed, width)
        if waits:
            wait(peers, rank, ranks, stage, epoch, state, notice, limit, failed, width, clocked)


@triton.jit(do_not_specialize=["rank", "ranks", "limit"])
def wait_kernel(
    peers, state, notice, rank, ranks, limit,
    stage: tl.constexpr, width: tl.constexpr, clocked: tl.constexpr,
):  # fmt: skip
    """One program: only wait, where sending was a launch of its own."""
    epoch, failed = tl.load(state + EPOCH), tl.load(state + FAILED)
    wait(peers, rank, ranks, stage, epoch, state, notice, limit, failed, width, clocked)
