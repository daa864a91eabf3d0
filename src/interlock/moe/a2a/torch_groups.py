"""What backends that go through a library, or through torch's own collectives, need of a group."""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.distributed as dist

from interlock.errors import StartupError
from interlock.parallel.group import Group


class _TorchGroup(Protocol):
    process_group: dist.ProcessGroup


def process_group(group: Group) -> dist.ProcessGroup:
    """The torch process group of a ``TorchGroup``, the kind of group that rank processes have."""
    return cast(_TorchGroup, group).process_group


def refuse_capture(flag: str, device: torch.device) -> None:
    """A buffer is built before graphs are captured; ``flag`` such as ``--moe-a2a-backend deepep``.

    Raises:
        StartupError: a graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StartupError(f"{flag}: the buffer is built before graphs are captured, not within one")
