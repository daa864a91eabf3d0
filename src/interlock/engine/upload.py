"""Small host arrays to a device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch

BOUNDARY = 256
"""Bytes at whose multiples arrays begin that travel together, as allocations of their own would."""


def upload(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """The array on ``device``: shared on a CPU, else copied through pinned memory behind earlier work."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_together(arrays: Sequence[npt.NDArray[Any]], device: torch.device | str) -> list[torch.Tensor]:
    """As ``upload`` of each, but by one copy: the device would wait between several small ones."""
    if torch.device(device).type == "cpu":
        return [upload(array, device) for array in arrays]
    packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, packed)
    return unpack(packed.to(device, non_blocking=True), arrays)


def packed_bytes(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """Bytes that ``arrays`` take up together."""
    return _ends(arrays)[-1]


def pack(arrays: Sequence[npt.NDArray[Any]], packed: torch.Tensor) -> None:
    """Copy ``arrays`` into uint8 ``packed`` of ``packed_bytes`` bytes."""
    for array, part in zip(arrays, unpack(packed, arrays), strict=True):
        part.copy_(torch.from_numpy(array))


def unpack(packed: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """The parts of ``packed`` that hold, or are to hold, ``arrays``: views of their dtypes and shapes."""
    parts = []
    for array, end in zip(arrays, _ends(arrays), strict=True):
        start = end - _padded(array)
        like = torch.from_numpy(array)
        parts.append(packed[start : start + array.nbytes].view(like.dtype).view(like.shape))
    return parts


def _padded(array: npt.NDArray[Any]) -> int:
    return -(-array.nbytes // BOUNDARY) * BOUNDARY


def _ends(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    return list(accumulate(map(_padded, arrays)))


def download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, filled when the work that is queued on the device so far is done."""
    return tensor.to("cpu", non_blocking=True)
