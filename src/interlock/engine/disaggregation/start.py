"""Builds one rank's part of a disaggregated server, in the order in which the rank itself is built."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch
import zmq

from interlock.engine.disaggregation import decode_link, prefill_link
from interlock.engine.disaggregation.copier import Copier
from interlock.engine.disaggregation.decode import DecodeRole
from interlock.engine.disaggregation.decode_link import DecodeLink
from interlock.engine.disaggregation.half import Deadlines
from interlock.engine.disaggregation.prefill import PrefillRole
from interlock.engine.disaggregation.prefill_link import FollowerLink, PrefillLink
from interlock.engine.disaggregation.role import AggregatedRole, Role
from interlock.engine.disaggregation.threads import LoopThread, Mailbox
from interlock.engine.disaggregation.wire import PROTOCOL, Hello
from interlock.engine.messages import ToEngine, TokenDelta, Wake
from interlock.engine.scheduler import Scheduler
from interlock.kv.cache import KVCache, Storage
from interlock.kv.transfer.base import KVReceiver, KVSender
from interlock.kv.transfer.layout import CacheLayout
from interlock.kv.transfer.registry import transfer_backends
from interlock.parallel.group import Group
from interlock.parallel.topology import Groups
from interlock.plan.disaggregation import DECODE, PREFILL
from interlock.plan.launch_plan import LaunchPlan
from interlock.plugins import load_symbol

WAKE_ADDRESS = "inproc://interlock-wake"
SECRET_BYTES = 16


class RankPart(Protocol):
    """What a rank keeps of the transfer. Calls come in this order, each once."""

    @property
    def storage(self) -> Storage | None:
        """Where the KV pools are to be allocated; None leaves it to the cache."""

    def register(self, cache: KVCache) -> None:
        """The pools exist now."""

    def start(self, scheduler: Scheduler | None, waker: Callable[[], None]) -> Role | None:
        """Reach the others; collective. The leader gets the role of its replica."""

    def observed(self) -> dict[str, object]:
        """Receipts of what was started."""

    def close(self) -> None:
        """Idempotent."""


def rank_part(plan: LaunchPlan, groups: Groups) -> RankPart:
    """The part of this rank, by the plan's role."""
    if plan.disaggregation_mode == PREFILL:
        return _PrefillPart(plan, groups)
    return _DecodePart(plan, groups) if plan.disaggregation_mode == DECODE else _NoPart()


def bind_waker(context: zmq.Context[zmq.Socket[bytes]], inputs: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that wakes a loop which polls ``inputs``; it belongs to the thread that uses it."""
    inputs.bind(WAKE_ADDRESS)
    waker = context.socket(zmq.PUSH)
    waker.setsockopt(zmq.LINGER, 0)
    waker.connect(WAKE_ADDRESS)
    return waker


def wake_message() -> bytes:
    """What a link sends to its own scheduler's socket, so that the loop takes its next turn at once."""
    message: ToEngine = Wake()
    return msgspec.msgpack.encode(message)


def reached_at(host: str) -> str:
    """Where processes of this machine reach what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def outward(host: str) -> str:
    """Where other machines reach what listens on ``host``: of a wildcard, the address of the default route,
    or this machine itself where there is none."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, far = (socket.AF_INET6, "2001:db8::1") if host == "::" else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))
        except OSError:
            return reached_at(host)
        address: str = probe.getsockname()[0]
        return address


class _NoPart:
    storage: Storage | None = None

    def register(self, cache: KVCache) -> None:
        return

    def start(self, scheduler: Scheduler | None, waker: Callable[[], None]) -> Role | None:
        return None if scheduler is None else AggregatedRole(scheduler)

    def observed(self) -> dict[str, object]:
        return {"disaggregation_mode": "none"}

    def close(self) -> None:
        return


class _Part:
    """What both roles share."""

    mode = ""

    def __init__(self, plan: LaunchPlan, groups: Groups) -> None:
        self._plan = plan
        self._groups = groups
        self._backend = transfer_backends().get(plan.disaggregation_transfer_backend)
        self._deadlines = Deadlines(plan.disaggregation_timeout, plan.disaggregation_queue_timeout)
        self._layout = CacheLayout.of(plan)
        self._seen: dict[str, object] = {"disaggregation_transfer_backend": self._backend.name}

    def observed(self) -> dict[str, object]:
        return dict(self._seen)

    def _end(self, symbol: str) -> Any:
        """The backend's sender or receiver of this rank."""
        host = self._plan.host
        where = outward(host) if self._backend.spans_hosts else reached_at(host)
        return load_symbol(symbol)(where, timeout=self._deadlines.peer)

    def _note_leader(self) -> None:
        self._seen |= {
            "disaggregation_mode": self.mode,
            "disaggregation_timeout": self._deadlines.peer,
            "disaggregation_queue_timeout": self._deadlines.queue,
        }


class _PrefillPart(_Part):
    mode = PREFILL
    storage: Storage | None = None

    def __init__(self, plan: LaunchPlan, groups: Groups) -> None:
        super().__init__(plan, groups)
        self._sender: KVSender = self._end(self._backend.sender)
        self._copier: Copier | None = None
        self._link: PrefillLink | FollowerLink | None = None

    def register(self, cache: KVCache) -> None:
        self._copier = Copier(self._sender, self._layout, self._groups.attn_tp.rank, cache.buffers())

    def start(self, scheduler: Scheduler | None, waker: Callable[[], None]) -> Role | None:
        assert self._copier is not None, "the cache is registered first"
        plan, copier = self._plan, self._copier
        if scheduler is None:
            (leader, *_) = gather(self._groups.attn_tp, b"")
            port, secret = msgspec.msgpack.decode(leader, type=tuple[int, bytes])
            follower = FollowerLink(
                copier, self._groups.attn_tp.rank, LoopThread("interlock-kv-link"), plan.stall_timeout
            )
            self._link = follower
            follower.attach(reached_at(plan.host), port, secret)
            return None
        mailbox = Mailbox(waker)
        settings = prefill_link.Settings(
            backend=self._backend.name,
            layout=self._layout,
            silence=plan.disaggregation_timeout,
            start_seconds=plan.stall_timeout,
            secret=secrets.token_bytes(SECRET_BYTES),
        )
        link = PrefillLink(settings, copier, mailbox, LoopThread("interlock-kv-link"))
        self._link = link
        is_first = self._groups.attn_dp.rank == 0
        port = link.listen(plan.host, plan.disaggregation_bootstrap_port if is_first else 0)
        gather(self._groups.attn_tp, msgspec.msgpack.encode((port, settings.secret)))
        ports = [int(each) for each in gather(self._groups.attn_dp, str(port).encode())]
        role = PrefillRole(scheduler, link, self._deadlines)
        link.open(
            prefill_link.Ends(heard=role.heard, lost=role.lost, copied=role.copied),
            [f":{number}" for number in ports],
        )
        self._note_leader()
        self._seen["disaggregation_bootstrap_port"] = ports[0]
        return _Delivering(role, mailbox)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


class _DecodePart(_Part):
    mode = DECODE

    def __init__(self, plan: LaunchPlan, groups: Groups) -> None:
        super().__init__(plan, groups)
        self._receiver: KVReceiver = self._end(self._backend.receiver)
        self._description = b""
        self._link: DecodeLink | None = None

    @property
    def storage(self) -> Storage | None:
        return self._receiver.allocate if self._plan.device == "cpu" else None

    def register(self, cache: KVCache) -> None:
        self._description = self._receiver.register(cache.buffers())

    def start(self, scheduler: Scheduler | None, waker: Callable[[], None]) -> Role | None:
        ranks = gather(self._groups.attn_tp, self._description)
        if scheduler is None:
            return None
        mailbox = Mailbox(waker)
        hello = Hello(protocol=PROTOCOL, backend=self._backend.name, layout=self._layout, ranks=tuple(ranks))
        link = DecodeLink(hello, self._deadlines.peer, mailbox, LoopThread("interlock-kv-link"))
        self._link = link
        quarantine = self._deadlines.peer + self._receiver.settle_seconds
        role = DecodeRole(scheduler, link, self._deadlines, quarantine=quarantine)
        link.open(decode_link.Ends(heard=role.heard, lost=role.lost))
        self._note_leader()
        return _Delivering(role, mailbox)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._receiver.close()


class _Delivering:
    """A role that hears what its link has to say at the beginning of each turn."""

    def __init__(self, role: PrefillRole | DecodeRole, mailbox: Mailbox) -> None:
        self._role = role
        self._mailbox = mailbox
        self.add = role.add
        self.abort = role.abort
        self.collect = role.collect
        self.stats = role.stats

    def turn(self) -> list[TokenDelta]:
        self._mailbox.deliver()
        return self._role.turn()


def gather(group: Group, payload: bytes) -> Sequence[bytes]:
    """Bytes of every rank of a group, in rank order. Collective."""
    sizes = group.all_gather(torch.tensor([len(payload)], dtype=torch.int64)).tolist()
    width = max(*sizes, 1)
    row = torch.zeros(1, width, dtype=torch.uint8)
    row[0, : len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else 0
    rows = group.all_gather(row)
    return [rows[i, :size].numpy().tobytes() for i, size in enumerate(sizes)]
