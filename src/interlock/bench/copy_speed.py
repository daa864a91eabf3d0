"""How fast a device copies, beside which an exchange of rows is seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

BYTES: Final = {"cpu": 256 << 20, "cuda": 1 << 30}
PASSES: Final = 5


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """Bytes a second: ``device`` counts each copied byte twice (read and written), as its memory sees it;
    ``peer`` is one way from one GPU to another, None where there is one GPU or none."""

    device: float
    peer: float | None
    how: str


def measure_copies(device: torch.device) -> CopySpeed:
    """Copy within ``device``, and from one GPU to another where there are two; nobody else should be busy."""
    size = BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _fastest(lambda: target.copy_(source), device)
    peer = None
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.empty(size, dtype=torch.uint8, device=f"cuda:{(_index(device) + 1) % 2}")
        peer = size / _fastest(lambda: other.copy_(source), device)
    return CopySpeed(2 * size / seconds, peer, f"copying {size >> 20} MiB")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    call()
    return min(_seconds(call, device) for _ in range(PASSES))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
