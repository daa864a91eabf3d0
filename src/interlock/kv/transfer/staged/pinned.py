"""Page-locked host memory, which a GPU copies to and from at full speed and without a copy in between."""

from __future__ import annotations

import torch

from interlock.errors import StartupError


def pin(memory: torch.Tensor) -> None:
    """Page-lock a CPU tensor's memory until ``unpin``, which must come before the memory goes.

    Raises:
        StartupError: the driver refuses.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status) != 0:
        raise StartupError(
            f"{memory.nbytes} bytes of staging memory cannot be page-locked (CUDA error {int(status)}); "
            "raise the limit of locked memory (ulimit -l)"
        )


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.data_ptr())
