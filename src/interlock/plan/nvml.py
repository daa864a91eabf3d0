"""NVIDIA devices through the driver's own library (NVML), without torch and without starting a context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from interlock.plan.facts import Device

NVLINK: Final = 2
ATOMICS: Final = 3
"""What ``nvmlDeviceGetP2PStatus`` is asked about (``nvmlGpuP2PCapsIndex_t``)."""
_JOINED_OR_UNKNOWN: Final = frozenset({0, 6})


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs in index order. ``apart``: pairs of indices, the smaller first, that no NVLink joins."""

    devices: tuple[Device, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Found:
    handle: ctypes.c_void_p
    uuid: str
    device: Device


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def nvidia_gpus(visible: str | None) -> Gpus:
    """The GPUs, and which of them nothing joins; none where there is no driver.

    ``visible`` is the value of ``CUDA_VISIBLE_DEVICES`` (indices or UUID prefixes), None for all.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Gpus()
    if nvml.nvmlInit_v2() != 0:
        return Gpus()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return Gpus()
        found = [_describe(nvml, index) for index in range(count.value)]
        chosen = found if visible is None else _select(found, visible)
        return Gpus(tuple(each.device for each in chosen), _apart(nvml, chosen))
    finally:
        nvml.nvmlShutdown()


def _select(found: Sequence[_Found], visible: str) -> list[_Found]:
    """As CUDA does: an entry that names no device ends the list, one that names a device again empties it."""
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(int(entry))
            continue
        named = [index for index, each in enumerate(found) if entry and each.uuid.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    if len(set(chosen)) < len(chosen):
        return []
    return [found[index] for index in chosen]


def _apart(nvml: Any, gpus: Sequence[_Found]) -> tuple[tuple[int, int], ...]:
    """Pairs for which the driver denies both NVLink and atomics in each other's memory."""
    return tuple(
        (first, second)
        for first, second in combinations(range(len(gpus)), 2)
        if all(_denied(nvml, gpus[first], gpus[second], what) for what in (NVLINK, ATOMICS))
    )


def _denied(nvml: Any, first: _Found, second: _Found, capability: int) -> bool:
    status = ctypes.c_int()
    try:
        ask = nvml.nvmlDeviceGetP2PStatus
    except AttributeError:
        return False
    answered = ask(first.handle, second.handle, ctypes.c_int(capability), ctypes.byref(status)) == 0
    return answered and status.value not in _JOINED_OR_UNKNOWN


def _describe(nvml: Any, index: int) -> _Found:
    """One device; fields that the driver does not tell stay empty."""
    handle = ctypes.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetName(handle, name, 96)
    nvml.nvmlDeviceGetUUID(handle, uuid, 96)
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    device = Device(
        kind="cuda",
        name=name.value.decode(errors="replace"),
        memory_total=memory.total,
        memory_free=memory.free,
        capability=f"{major.value}.{minor.value}",
    )
    return _Found(handle, uuid.value.decode(errors="replace"), device)
