"""NVIDIA devices through the driver's own library (NVML), without torch and without starting a context."""

from __future__ import annotations

import ctypes
from typing import Any

from interlock.plan.facts import Device


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def nvidia_devices(visible: str | None) -> tuple[Device, ...]:
    """Devices in index order; none where there is no driver.

    ``visible`` is the value of ``CUDA_VISIBLE_DEVICES`` (indices or UUID prefixes), None for all.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = [_describe(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()
    if visible is None:
        return tuple(device for _, device in found)
    return tuple(_select(found, visible))


def _select(found: list[tuple[str, Device]], visible: str) -> list[Device]:
    """As CUDA does: an entry that names no device ends the list, one that names a device again empties it."""
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(found):
            chosen.append(int(entry))
            continue
        named = [index for index, (uuid, _) in enumerate(found) if entry and uuid.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    if len(set(chosen)) < len(chosen):
        return []
    return [found[index][1] for index in chosen]


def _describe(nvml: Any, index: int) -> tuple[str, Device]:
    """The UUID and facts of one device; fields that the driver does not tell stay empty."""
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
    return uuid.value.decode(errors="replace"), device
