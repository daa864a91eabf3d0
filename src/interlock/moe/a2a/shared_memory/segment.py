"""Memory that the ranks of one host share: anonymous, so that nothing can leak when a rank dies.

Every rank makes its segment with ``memfd_create`` and the others open it through /proc. It has no name, is
not bounded by the size of /dev/shm, and the kernel frees it with the last process that maps it, however that
process ends.
"""

from __future__ import annotations

import mmap
import os
import secrets

import torch

from interlock.errors import StartupError
from interlock.moe.a2a.shared_memory.shape import HEADER_BYTES
from interlock.parallel.group import Group

_TOKEN_BYTES = 8


def share_segments(group: Group, size: int) -> list[torch.Tensor]:
    """Create this rank's segment and map all ranks': uint8 [size] by rank. Collective.

    The memory is committed here, so that running out of it is an error now and not a crash in a step.

    Raises:
        StartupError: there is not enough memory, or a rank runs on another host.
    """
    if not hasattr(os, "memfd_create"):
        raise StartupError(
            "shared memory without a name needs Linux; --moe-a2a-backend collective runs anywhere"
        )
    descriptor = os.memfd_create("interlock-a2a", os.MFD_CLOEXEC)
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise StartupError(
                f"{size} bytes of shared memory cannot be had: {error}; "
                "lower --chunked-prefill-size or --max-running-requests"
            ) from error
        own = mmap.mmap(descriptor, size)
        token = secrets.randbits(62)
        own[:_TOKEN_BYTES] = token.to_bytes(_TOKEN_BYTES, "little")
        where = torch.tensor([[os.getpid(), descriptor, token, size]], dtype=torch.int64)
        addresses = group.all_gather(where).tolist()
        maps = [
            own if rank == group.rank else _attach(rank, *address) for rank, address in enumerate(addresses)
        ]
        group.barrier()
    finally:
        os.close(descriptor)
    return [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps]


def _attach(rank: int, pid: int, descriptor: int, token: int, size: int) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{descriptor}"
    problem = f"rank {rank} (process {pid}) cannot be reached through shared memory"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(
            f"{problem}: {error}; all ranks must run on one host, in one process namespace and as one user"
        ) from error
    try:
        if os.fstat(opened).st_size < max(size, HEADER_BYTES):
            raise StartupError(f"{problem}: what {path} names is not its segment")
        memory = mmap.mmap(opened, size)
    finally:
        os.close(opened)
    if int.from_bytes(memory[:_TOKEN_BYTES], "little") != token:
        raise StartupError(f"{problem}: it runs on another host")
    return memory
