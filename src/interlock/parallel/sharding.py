"""Which part of a dimension or of the heads a rank holds. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from interlock.errors import StartupError
from interlock.plan.card import AttentionCard


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of a dimension cut into equal parts; the last parts may hold padding.

    Attributes:
        size: places of this part, the same for every part.
        live: the places that exist; empty when the part is padding only.
    """

    size: int
    live: range

    @property
    def padding(self) -> int:
        return self.size - len(self.live)


def shard(total: int, parts: int, index: int) -> Shard:
    """Cut ``total`` places into ``parts`` equal parts, rounded up.

    >>> shard(10, 4, 3)
    Shard(size=3, live=range(9, 10))
    """
    size = -(-total // parts)
    return Shard(size, range(min(index * size, total), min((index + 1) * size, total)))


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Global head numbers that one attention-TP rank computes."""

    q: range
    kv: range


def kv_heads_of(kv_heads: int, parts: int, index: int) -> range:
    """Global key-value heads that attention-TP rank ``index`` of ``parts`` holds; the sizes divide.

    With more ranks than heads each head is held by ``parts / kv_heads`` ranks.
    """
    start = index * kv_heads // parts
    return range(start, start + max(1, kv_heads // parts))


def shard_heads(attention: AttentionCard, parts: int, index: int) -> HeadShard:
    """Heads of rank ``index`` of ``parts``: consecutive query heads and the key-value heads they read.

    With more ranks than key-value heads each of these is held by ``parts / num_kv_heads`` ranks.

    Raises:
        StartupError: sizes that do not divide.
    """
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    if heads % parts or (kv_heads % parts and parts % kv_heads):
        fitting = [
            p for p in range(1, heads + 1) if heads % p == 0 and (kv_heads % p == 0 or p % kv_heads == 0)
        ]
        raise StartupError(
            f"{heads} query and {kv_heads} key-value heads cannot be cut into {parts} attention-TP ranks; "
            f"possible: {', '.join(map(str, fitting))}"
        )
    q_size = heads // parts
    q = range(index * q_size, (index + 1) * q_size)
    return HeadShard(q=q, kv=kv_heads_of(kv_heads, parts, index))
