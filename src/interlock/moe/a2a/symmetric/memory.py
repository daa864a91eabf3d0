"""Memory that every rank of a group can write to, through torch symmetric memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interlock.errors import StartupError
from interlock.moe.a2a.torch_groups import process_group
from interlock.parallel.group import Group


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """``own``: uint8, zeroed on every rank; ``addresses`` of all ranks' in this process; ``lease`` keeps them
    mapped."""

    own: torch.Tensor
    addresses: tuple[int, ...]
    lease: Any


def share_region(group: Group, size: int, device: torch.device) -> SharedRegion:
    """Allocate ``size`` bytes on this rank's device and map those of all ranks of ``group``. Collective.

    Raises:
        StartupError: the memory cannot be had, or the devices cannot reach each other.
    """
    if group.size == 1:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        return SharedRegion(own, (own.data_ptr(),), None)
    import torch.distributed._symmetric_memory as symmetric_memory

    try:
        own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        own.zero_()
        lease = symmetric_memory.rendezvous(own, process_group(group))
    except RuntimeError as error:
        raise StartupError(_explained(size, device, error)) from error
    torch.cuda.synchronize(device)
    group.barrier()
    # The region may be a part of the block that is mapped.
    starts = group.all_gather(torch.tensor([own.data_ptr() - int(lease.buffer_ptrs[group.rank])])).tolist()
    addresses = tuple(int(base) + start for base, start in zip(lease.buffer_ptrs, starts, strict=True))
    return SharedRegion(own, addresses, lease)


def _explained(size: int, device: torch.device, error: RuntimeError) -> str:
    reason = str(error).strip().partition("\n")[0]
    if "out of memory" in reason.lower():
        return (
            f"{size} bytes of symmetric memory cannot be had on {device}: {reason}; "
            "lower --chunked-prefill-size, --moe-prefill-capacity or --max-running-requests"
        )
    if "overlapping" in reason.lower():
        return (
            f"{device} is shared by several ranks, which torch refuses unless told otherwise ({reason}); "
            "start with --ranks-per-gpu"
        )
    return (
        f"ranks cannot reach each other's memory on {device}: {reason}; the GPUs must be peers (one machine, "
        "NVLink) and visible to every rank; --moe-a2a-backend collective needs neither"
    )
