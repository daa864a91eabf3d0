"""What a prefill and a decode server say to each other, and the ranks of a prefill replica among themselves.

Messages are msgpack behind a length of four bytes, over TCP. The decode server connects to the prefill
server. Everything that comes in is bounded and typed; a peer that sends anything else is cut off.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from interlock.engine.messages import AddRequest, TokenLogprob
from interlock.kv.transfer.layout import CacheLayout

PROTOCOL = 2
MOST_BYTES = 64 << 20
LENGTH = struct.Struct("<I")

Key = tuple[int, int]
"""Room and choice."""


class Directory(msgspec.Struct, frozen=True, kw_only=True, tag="directory"):
    """Prefill -> decode, first of all: host:port of the leader of each attention replica."""

    protocol: int
    addresses: tuple[str, ...]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Decode -> prefill: the layout of a replica's cache, and how to write to each rank's."""

    protocol: int
    backend: str
    layout: CacheLayout
    ranks: tuple[bytes, ...]


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Prefill -> decode: the pools are mapped."""


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag="farewell"):
    """Prefill -> decode: the two do not fit; the last message of a connection."""

    reason: str


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Decode -> prefill: the request of ``key`` is here. ``digest``: of what was asked."""

    key: Key
    digest: bytes


class Matched(msgspec.Struct, frozen=True, kw_only=True, tag="matched"):
    """Prefill -> decode: both halves are here."""

    key: Key


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag="reserve"):
    """Decode -> prefill: pages for the whole prompt, by page index; -1 where none is wanted.

    ``held``: tokens of the prompt whose keys and values the decode server has already. ``window_start``: the
    first token that it wants of sliding-window layers, where a page of its own begins.
    """

    key: Key
    held: int
    window_start: int
    full: tuple[int, ...]
    window: tuple[int, ...]


class Sending(msgspec.Struct, frozen=True, kw_only=True, tag="sending"):
    """Prefill -> decode: the whole prompt is computed, its last pages are on their way."""

    key: Key


class HandOver(msgspec.Struct, frozen=True, kw_only=True, tag="hand_over"):
    """Prefill -> decode, once for each key: all pages have arrived and nothing more is written.

    Attributes:
        tokens: of the prompt, all of whose keys and values are at the decode server now.
        token: the first generated one, None for max_tokens 0.
        seed: of the request's random draws.
    """

    key: Key
    tokens: int
    token: int | None
    logprob: TokenLogprob | None
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    seed: int
    cached_tokens: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Prefill -> decode, in place of ``HandOver``: it failed, and nothing more is written."""

    key: Key
    error: str
    refused: bool = False


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Decode -> prefill: the request is over here. Answered with ``Ended`` once nothing is written."""

    key: Key


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Both ways, every second or so: this process lives."""


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """Follower of a prefill replica -> its leader: ``rank`` within the replica will copy."""

    rank: int
    secret: bytes


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Leader -> follower: map the pools of a decode replica as number ``target``."""

    target: int
    layout: CacheLayout
    ranks: tuple[bytes, ...]


class Close(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """Leader -> follower: write no more to the decode server ``target``."""

    target: int


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="copy"):
    """Leader -> follower: copy tokens ``start : end``, in the window space from ``window_start`` on.

    Pages of both servers are given by page index.
    """

    job: int
    target: int
    start: int
    end: int
    window_start: int
    source_full: tuple[int, ...]
    source_window: tuple[int, ...]
    target_full: tuple[int, ...]
    target_window: tuple[int, ...]


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Follower -> leader: ``Copy`` or ``Open`` (by target) is over. ``error``: "" when all is well."""

    job: int
    rank: int
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0


Message = (
    Directory | Hello | Welcome | Farewell | Join | Matched | Reserve | Sending | HandOver | Ended | Cancel
    | Ping | Attach | Open | Close | Copy | Done
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """A frame: length and body."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Message:
    """Raises ``msgspec.DecodeError`` for anything but a message."""
    return _DECODER.decode(body)


def digest(message: AddRequest) -> bytes:
    """Of everything that decides the first token, to see that both servers were asked the same.

    How long the answer may get is the decode server's business; its limit may be another one.
    """
    first = msgspec.structs.replace(message.sampling, max_tokens=min(1, message.sampling.max_tokens))
    asked = (message.token_ids, first, message.grammar)
    return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()


def key_of(message: AddRequest) -> Key:
    """Raises ``ValueError`` for a request that meets nobody."""
    if message.meeting is None:
        raise ValueError("the request has no meeting")
    return message.meeting.room, message.meeting.choice


def replica_of(key: Key, replicas: int) -> int:
    """The prefill replica that computes a key; both servers and the front end reckon it alike."""
    return (key[0] + key[1]) % replicas
