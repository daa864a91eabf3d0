"""Bytes that DeepEP v1's Buffer takes on a rank, by its own formulas (``csrc/legacy/config.hpp``).

Normal mode keeps queues of chunks for each channel and peer, in NVLink memory and, beyond 8 ranks, in RDMA
memory; low latency keeps two sets of room for E * T messages each way. Capacity T does not enter normal mode.
"""

from __future__ import annotations

from typing import Final

from interlock.moe.a2a.backend import BufferShape
from interlock.moe.a2a.low_latency_sizes import library_capacity
from interlock.moe.terms import Layout, Phase

NVLINK_PEERS: Final = 8
SMS: Final = 20
WORKSPACE: Final = 32 << 20
ALIGNMENT: Final = 128
_TOP_K, _SCALES, _SOURCE_META = 128, 128, 8
_NVLINK_CHUNKS: Final = {16: 288, 24: 288, 32: 288, 48: 288, 64: 288, 96: 480, 128: 560, 144: 720, 160: 720}
_RDMA_CHUNKS: Final = 128
RANKS: Final = (2, 4, 8, *_NVLINK_CHUNKS)
"""Sizes of the EP group that the library has settings for."""
HIDDEN: Final = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that its low-latency kernels are compiled for."""


def nvlink_bytes(ranks: int, row: int) -> int:
    """``Config.get_nvl_buffer_size_hint`` for rows of ``row`` bytes, the larger of both directions."""
    machines, peers, channels = max(1, ranks // NVLINK_PEERS), min(ranks, NVLINK_PEERS), SMS // 2
    chunk = _NVLINK_CHUNKS.get(ranks, 256)
    slots = channels * peers * chunk
    total = channels * peers * (2 * machines + 3) * 4
    total += slots * (row + _SOURCE_META + _TOP_K * (8 + 4) + _SCALES * 4)
    return -(-total // ALIGNMENT) * ALIGNMENT


def rdma_bytes(ranks: int, row: int) -> int:
    """``Config.get_rdma_buffer_size_hint``: 0 within one machine."""
    if ranks <= NVLINK_PEERS:
        return 0
    machines, channels = ranks // NVLINK_PEERS, SMS // 2
    slots = channels * machines * _RDMA_CHUNKS
    total = channels * machines * (NVLINK_PEERS * 2 + 2) * 2 * 4
    total += slots * (row + _SOURCE_META + _TOP_K * (8 + 4) + _SCALES * 4 + 16) * 2
    return -(-total // ALIGNMENT) * ALIGNMENT


def low_latency_bytes(tokens: int, hidden: int, experts: int) -> int:
    """``Buffer.get_low_latency_rdma_size_hint`` for T = ``tokens``."""
    groups = hidden // 128
    out = 16 + max(2 * hidden, hidden + 4 * groups)
    home = 4 * groups + 2 * hidden
    send = max(tokens * out, experts * tokens * home)
    receive = experts * tokens * max(out, home)
    signals = -(-4 * experts // 128) * 128
    total = 2 * (send + receive + signals)
    return (total + ALIGNMENT) // ALIGNMENT * ALIGNMENT


def reserved(shape: BufferShape) -> tuple[int, int]:
    """(NVLink, RDMA) bytes that Buffer is given."""
    row = 2 * shape.hidden_size
    tokens = library_capacity(shape.capacity[Phase.DECODE])
    rdma = max(rdma_bytes(shape.ranks, row), low_latency_bytes(tokens, shape.hidden_size, shape.num_experts))
    return nvlink_bytes(shape.ranks, row), rdma


def fixed_bytes(shape: BufferShape) -> int:
    """What one rank allocates before the first step."""
    return sum(reserved(shape)) + WORKSPACE


def buffer_bytes(shape: BufferShape) -> int:
    """The fixed part and the most rows of one step: every lane is a row of its own, see ``normal.py``."""
    local = -(-shape.num_experts // shape.ranks)
    worst = 0
    for phase, layout in shape.layouts.items():
        tokens = shape.capacity[phase]
        if layout == Layout.MASKED:
            rows = local * shape.ranks * library_capacity(tokens)
            worst = max(worst, rows * (shape.row_bytes + 8))
            continue
        sent = tokens * shape.top_k
        received = shape.ranks * tokens * min(shape.top_k, local)
        held = 2 * sent + 2 * received + (shape.alignment - 1) * local
        worst = max(worst, held * (shape.row_bytes + 16))
    return fixed_bytes(shape) + worst
