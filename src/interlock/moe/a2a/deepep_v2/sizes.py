"""Bytes that DeepEP's ElasticBuffer takes on a rank, by its own formulas (2.1.0: csrc/elastic/buffer.hpp).

A *record* is one token on its way. Dispatch carries a row, its scales and its routes; combine carries a row
of bfloat16 and room for weights. Records are padded to 32 bytes, buffers to 2 MiB.

Legend: R ranks, T capacity, k experts a token, L experts of a rank, h hidden size.
"""

from __future__ import annotations

from interlock.moe.a2a.backend import BufferShape
from interlock.moe.terms import Layout

RECORD_ALIGNMENT = 32
BUFFER_ALIGNMENT = 2 << 20
SCALE_CHANNELS = 32
"""The library sizes scales for one in 32 channels, whatever is sent."""
CHANNELS = 8 * 160
"""Slots for channels in the buffers between machines (8 on each of at most 160 SMs)."""
MAX_RANKS, MAX_EXPERTS, MAX_LOCAL_EXPERTS, MAX_TOP_K = 1024, 2048, 256, 32
_WORKSPACE_CHANNELS = 1024
_WORKSPACE_SESSIONS = 32

HYBRID, DIRECT = "hybrid", "direct"


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def symmetric_bytes(shape: BufferShape, tokens: int, *, fp8: bool) -> int:
    """The buffer for T = ``tokens``: what ``ElasticBuffer.get_buffer_size_hint`` answers.

    With ``allow_multiple_reduction=False``: every lane of a token has a slot of its own on the way home.
    """
    elements = 1 if fp8 else 2
    scales = _padded(4 * -(-shape.hidden_size // SCALE_CHANNELS), RECORD_ALIGNMENT) if fp8 else 0
    routes = 8 * shape.top_k + 4 * (1 + shape.top_k)
    out = _padded(shape.hidden_size * elements, RECORD_ALIGNMENT) + scales + _padded(routes, RECORD_ALIGNMENT)
    home = _padded(shape.hidden_size * 2, RECORD_ALIGNMENT) + _padded(8 * shape.top_k, RECORD_ALIGNMENT)
    if shape.mode == HYBRID and shape.nodes > 1:
        across, within = shape.nodes, shape.ranks // shape.nodes
        dispatch = (within * across * tokens + tokens + across * (tokens + CHANNELS)) * out
        combine = shape.top_k * (across * tokens + across * (tokens + CHANNELS) + tokens) * home
    else:
        dispatch = shape.ranks * tokens * out
        combine = shape.top_k * tokens * home
    return _padded(max(dispatch, combine), BUFFER_ALIGNMENT)


def workspace_bytes() -> int:
    """Counters and flags at the front of the buffer; the same for every shape."""
    both = MAX_RANKS + MAX_EXPERTS
    table = MAX_RANKS * _WORKSPACE_CHANNELS
    total = 16 + both * 8 + both * 8 * 2 + MAX_RANKS * 4 + both * 4 * 2 + table * 8 + table * 4
    total += 2 * 2 * 8 + (_WORKSPACE_SESSIONS + 1) * MAX_RANKS * 4
    return _padded(total, BUFFER_ALIGNMENT)


def slab_bytes(shape: BufferShape) -> int:
    """Rows, scales and weights of the masked slab, which is allocated once: L * R * T rows."""
    rows = 0
    for phase, layout in shape.layouts.items():
        if layout == Layout.MASKED:
            local = -(-shape.num_experts // shape.ranks)
            rows = max(rows, local * shape.ranks * shape.capacity[phase])
    return rows * (shape.row_bytes + shape.scale_bytes + 4)


def transient_bytes(shape: BufferShape) -> int:
    """The most that the library and the contiguous layout allocate within one step, from torch's pool."""
    worst = 0
    for phase, layout in shape.layouts.items():
        received = shape.ranks * shape.capacity[phase]
        local = -(-shape.num_experts // shape.ranks)
        lanes = received * min(shape.top_k, local)
        row = shape.row_bytes + shape.scale_bytes
        rows = received * (row + 12 * shape.top_k + 4 * (shape.top_k + 2))
        if layout == Layout.CONTIGUOUS:
            rows += (lanes + (shape.alignment - 1) * local) * (row + 4)
        worst = max(worst, rows + local * received * 12)
    return worst


def fixed_bytes(shape: BufferShape) -> int:
    """What one rank allocates before the first step."""
    largest = max(shape.capacity.values())
    return symmetric_bytes(shape, largest, fp8=shape.scale_bytes > 0) + workspace_bytes() + slab_bytes(shape)


def buffer_bytes(shape: BufferShape) -> int:
    """What the plan reserves on one rank: the fixed part and the largest step's rows."""
    return fixed_bytes(shape) + transient_bytes(shape)
