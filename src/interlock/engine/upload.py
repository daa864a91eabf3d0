"""Small host arrays to a device without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """The array on ``device``: shared on a CPU, else copied through pinned memory behind earlier work."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, filled when the work that is queued on the device so far is done."""
    return tensor.to("cpu", non_blocking=True)
