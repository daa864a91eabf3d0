"""Where everything lies in the memory of one rank: the single place that knows the layout. No torch here.

A rank's region, which its peers write into:

    flags [4][R] | counts [R][E] | weights [S] | origins [S] | scales [S][groups] | rows [S] | results [T][k]

Rank s writes the counts of its lanes by global expert into ``counts[s]`` of every rank, its rows straight to
their final places in ``rows`` of the rank that computes them, and the results of rank d's lanes into
``results`` of rank d. One flag for each (stage, peer) says how far that peer is. Everything else is private.

Where few tokens can come (``few_tokens``, F), more lies behind, for an exchange of one launch each way:

    published [R][P] | routes, route weights [R][F][k] | tokens, token scales [F] |
    places [F][k] | result slab [S of F]

Rank s writes its routes to every rank, and its rows to its own ``tokens``, from
where others read them; a rank that computes lanes of rank d writes their rows in its slab to ``places`` of d.

Why one set of buffers is enough: a rank writes rows of step e + 1 only after it has the counts of step e + 1
of every rank, and a rank sends those behind everything that it did with step e, in the order of its stream.
With few tokens there are no counts to wait for: then a combine does not end before all ranks are in theirs,
and ranks that give up on a dispatch meet before the next.

Legend: R ranks, E experts, L experts of a rank, T the larger capacity, k experts a token, S rows that may
arrive, A alignment.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlock.moe.a2a.backend import BufferShape
from interlock.moe.terms import Layout

ALIGNED = 128
FLAG_BYTES = 128
STAGES = 4
"""Counts, rows, results, released."""
GRANULARITY = 2 * 1024 * 1024
"""Symmetric memory is mapped in pages of this size."""
SECTIONS = (
    "flags", "counts", "weights", "origins", "scales", "rows", "results", "published", "routes",
    "route_weights", "tokens", "token_scales", "places", "result_slab",
)  # fmt: skip
PUBLISHERS = 32
"""Programs at most that publish a rank's tokens."""
FEW_ROUTES = 32768
"""Lanes of all ranks up to which each program looks through all of them."""
FEW_LANES = 1024
"""Lanes up to which one program counts, exchanges and places them all."""
CHUNK = 256
"""Lanes that one program counts where there are more."""
STATE_BYTES = 128
INT32, INT64 = 4, 8


def _aligned(size: int, to: int = ALIGNED) -> int:
    return -(-size // to) * to


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class RegionShape:
    """Sizes of a rank's memory, derived from ``BufferShape``; equal on all ranks.

    ``slab_rows`` is S: what the larger of both phases may assemble. ``few_tokens``: the largest capacity of a
    phase with slabs whose lanes are few, 0 for none; ``few_rows`` of a slab result then.
    """

    ranks: int
    num_experts: int
    capacity: int
    top_k: int
    row_bytes: int
    scale_bytes: int
    result_bytes: int
    slab_rows: int
    few_tokens: int = 0
    few_rows: int = 0

    @staticmethod
    def of(shape: BufferShape) -> RegionShape:
        few = _few_tokens(shape)
        return RegionShape(
            ranks=shape.ranks,
            num_experts=shape.num_experts,
            capacity=max(shape.capacity.values()),
            top_k=shape.top_k,
            row_bytes=shape.row_bytes,
            scale_bytes=shape.scale_bytes,
            result_bytes=shape.result_bytes,
            slab_rows=_slab_rows(shape),
            few_tokens=few,
            few_rows=_local(shape) * shape.ranks * few,
        )

    @property
    def lanes(self) -> int:
        """Lanes of one rank, T * k."""
        return self.capacity * self.top_k

    @property
    def few_lanes(self) -> int:
        """Lanes of one rank in a step of few tokens, F * k."""
        return self.few_tokens * self.top_k

    def is_few(self, capacity: int) -> bool:
        """Whether slabs of ``capacity`` tokens a rank are exchanged in one launch each way."""
        return 0 < capacity <= self.few_tokens

    @property
    def bins(self) -> int:
        """Width of a histogram of lanes by expert: one bin at least is left for lanes without one."""
        return power_of_two(self.num_experts + 1)

    @property
    def chunks(self) -> int:
        """Chunks of lanes, at least one."""
        return max(1, -(-self.lanes // CHUNK))

    def sizes(self) -> dict[str, int]:
        """Bytes of each section of the region."""
        return {
            "flags": STAGES * self.ranks * FLAG_BYTES,
            "counts": self.ranks * self.num_experts * INT32,
            "weights": self.slab_rows * INT32,
            "origins": self.slab_rows * INT32,
            "scales": self.slab_rows * self.scale_bytes,
            "rows": self.slab_rows * self.row_bytes,
            "results": self.lanes * self.result_bytes,
            "published": self.ranks * PUBLISHERS * INT32 if self.few_tokens else 0,
            "routes": self.ranks * self.few_lanes * INT32,
            "route_weights": self.ranks * self.few_lanes * INT32,
            "tokens": self.few_tokens * self.row_bytes,
            "token_scales": self.few_tokens * self.scale_bytes,
            "places": self.few_lanes * INT32,
            "result_slab": self.few_rows * self.result_bytes,
        }

    def offsets(self) -> dict[str, int]:
        """Where each section starts."""
        offsets, end = {}, 0
        for name, size in self.sizes().items():
            offsets[name] = end
            end = _aligned(end + size)
        return offsets

    @property
    def region_bytes(self) -> int:
        """Bytes of the region, in whole pages."""
        return _aligned(sum(_aligned(size) for size in self.sizes().values()), GRANULARITY)

    @property
    def private_bytes(self) -> int:
        """Addresses of all sections of all ranks, owner of each expert and its first expert, counters, first
        places by chunk, the target of each lane, and the lanes of each row of few."""
        tables = len(SECTIONS) * self.ranks * INT64 + 2 * self.num_experts * INT32
        chunks = self.chunks * self.bins * INT32
        return tables + STATE_BYTES + chunks + self.lanes * INT64 + self.few_rows * INT32


def _local(shape: BufferShape) -> int:
    return -(-shape.num_experts // shape.ranks)


def _few_tokens(shape: BufferShape) -> int:
    most = FEW_ROUTES // (shape.ranks * shape.top_k)
    masked = [tokens for phase, tokens in shape.capacity.items() if shape.layouts[phase] == Layout.MASKED]
    return max((tokens for tokens in masked if tokens <= most), default=0)


def _slab_rows(shape: BufferShape) -> int:
    """S. Of the contiguous layout: every lane of every rank, and A - 1 rows of padding for each expert."""
    local = _local(shape)
    worst = 0
    for phase, capacity in shape.capacity.items():
        received = shape.ranks * capacity
        if shape.layouts[phase] == Layout.MASKED:
            rows = local * received
        else:
            lanes = received * min(shape.top_k, local)
            rows = (lanes + (shape.alignment - 1) * local) // shape.alignment * shape.alignment
        worst = max(worst, rows, shape.alignment)
    return worst


def buffer_bytes(shape: BufferShape) -> int:
    """Region and private memory of one rank: exactly what its dispatcher allocates when it is built."""
    where = RegionShape.of(shape)
    return where.region_bytes + where.private_bytes
