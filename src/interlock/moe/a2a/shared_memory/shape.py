"""Where everything lies in the memory of one rank: the single place that knows the segment's layout.

A rank's segment, which its peers map and write into:

    header | dispatch flags [R] | return flags [R] | mailboxes [2][R] | results [T][k]

``mailboxes[p][s]`` holds what rank s sent in steps of parity p: a header, one row (and its scales) for each
token that has an expert here, and one lane record for each (token, expert here). ``results[t][j]`` is where
whoever computed lane j of this rank's token t writes the result. The assembled rows are private memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlock.moe.a2a.backend import BufferShape
from interlock.moe.terms import Layout

CACHE_LINE = 64
HEADER_BYTES = 4096
LANE_BYTES = 16
ORIGIN_BYTES = 12
WEIGHT_BYTES = 4


def _aligned(size: int) -> int:
    return -(-size // CACHE_LINE) * CACHE_LINE


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """Offsets and sizes in bytes, derived from ``BufferShape``; T is the larger of both phases'."""

    ranks: int
    capacity: int
    top_k: int
    row_bytes: int
    scale_bytes: int
    result_bytes: int

    @staticmethod
    def of(shape: BufferShape) -> SegmentShape:
        return SegmentShape(
            ranks=shape.ranks,
            capacity=max(shape.capacity.values()),
            top_k=shape.top_k,
            row_bytes=shape.row_bytes,
            scale_bytes=shape.scale_bytes,
            result_bytes=shape.result_bytes,
        )

    @property
    def dispatch_flags(self) -> int:
        return HEADER_BYTES

    @property
    def return_flags(self) -> int:
        return self.dispatch_flags + self.ranks * CACHE_LINE

    @property
    def mailboxes(self) -> int:
        return self.return_flags + self.ranks * CACHE_LINE

    @property
    def mailbox_rows(self) -> int:
        """Offset of the rows within a mailbox, behind its header and lane records."""
        return CACHE_LINE + _aligned(self.capacity * self.top_k * LANE_BYTES)

    @property
    def mailbox_scales(self) -> int:
        return self.mailbox_rows + _aligned(self.capacity * self.row_bytes)

    @property
    def mailbox_bytes(self) -> int:
        return self.mailbox_scales + _aligned(self.capacity * self.scale_bytes)

    @property
    def results(self) -> int:
        return self.mailboxes + 2 * self.ranks * self.mailbox_bytes

    @property
    def total(self) -> int:
        return self.results + _aligned(self.capacity * self.top_k * self.result_bytes)


def assembled_rows(shape: BufferShape, local_experts: int) -> int:
    """Rows that the larger of both phases may assemble on one rank."""
    worst = 0
    for phase, capacity in shape.capacity.items():
        received = shape.ranks * capacity
        if shape.layouts[phase] == Layout.MASKED:
            rows = local_experts * received
        else:
            rows = received * min(shape.top_k, local_experts) + (shape.alignment - 1) * local_experts
            rows = -(-rows // shape.alignment) * shape.alignment
        worst = max(worst, rows)
    return worst


def assembled_row_bytes(shape: BufferShape) -> int:
    """One assembled row with its scales, its weight and where it came from."""
    return shape.row_bytes + shape.scale_bytes + WEIGHT_BYTES + ORIGIN_BYTES


def buffer_bytes(shape: BufferShape) -> int:
    """Segment plus private rows, for the rank with most experts."""
    local = -(-shape.num_experts // shape.ranks)
    return SegmentShape.of(shape).total + assembled_rows(shape, local) * assembled_row_bytes(shape)
