"""Machine facts: what the planner knows of a machine. Probed without torch; JSON-able, so that a plan can be
made for another machine."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from interlock.errors import Refusal
from interlock.plan.nccl import NcclLibrary, nccl_libraries

CORE_PACKAGES: Final = ("torch", "numpy", "safetensors", "tokenizers", "pyzmq", "msgspec", "triton")
TRACING_PACKAGES: Final = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
RDMA: Final = Path("/sys/class/infiniband")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator. Memory in bytes; ``capability`` such as "9.0"."""

    kind: str
    name: str
    memory_total: int
    memory_free: int
    capability: str = ""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node. With several nodes all are taken to be alike.

    Attributes:
        cores: CPU cores this process may use (affinity and cgroup quota).
        memory_available: bytes of host memory that can be allocated now (cgroup limit included).
        gpus_apart: pairs of ``devices``, by index, that the driver says no NVLink joins.
        packages: version by distribution name, for those that were asked for and are installed.
        libraries: what loading each system library that was asked for gave, "" where it can be loaded.
        native_kernels_problem: why the native CPU kernels cannot be used, or None.
        nccl: NCCL libraries, those that a process would rather load first.
        environment: values of the variables that were asked for and are set, which other packages read.
        rdma_devices: names of network devices with RDMA.
    """

    os: str
    architecture: str
    python: str
    cores: int
    memory_total: int
    memory_available: int
    devices: tuple[Device, ...] = ()
    gpus_apart: tuple[tuple[int, int], ...] = ()
    packages: Mapping[str, str] = {}
    native_kernels_problem: str | None = None
    libraries: Mapping[str, str] = {}
    nccl: tuple[NcclLibrary, ...] = ()
    environment: Mapping[str, str] = {}
    rdma_devices: tuple[str, ...] = ()


def probe(
    *,
    packages: Iterable[str] = (),
    libraries: Iterable[str] = (),
    variables: Iterable[str] = (),
) -> MachineFacts:
    """Facts of this machine, of its GPUs those that ``CUDA_VISIBLE_DEVICES`` names.

    Args:
        packages: distribution names to look up beside the core ones.
        libraries: file names of shared libraries to try.
        variables: environment variables that packages read.
    """
    from interlock.kernels.availability import native_cpu_unavailable
    from interlock.plan.nvml import nvidia_gpus

    total, available = _memory()
    gpus = nvidia_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return MachineFacts(
        os=platform.system().lower(),
        architecture=platform.machine(),
        python=platform.python_version(),
        cores=_cores(),
        memory_total=total,
        memory_available=available,
        devices=gpus.devices,
        gpus_apart=gpus.apart,
        packages=installed({*CORE_PACKAGES, *TRACING_PACKAGES, *packages}),
        native_kernels_problem=native_cpu_unavailable(),
        libraries={name: _loading(name) for name in sorted(libraries)},
        nccl=nccl_libraries(),
        environment={name: os.environ[name] for name in sorted(variables) if name in os.environ},
        rdma_devices=_entries(RDMA),
    )


def _entries(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def _loading(library: str) -> str:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those of ``names`` that are installed."""
    found = {}
    for name in sorted(names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def load_facts(path: str) -> MachineFacts:
    """Facts of another machine from the JSON that ``interlock plan --save-facts`` wrote there."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=MachineFacts)
    except (OSError, msgspec.DecodeError) as error:
        raise Refusal(option="--facts", given=path, rule=f"cannot be read: {error}") from None


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _memory() -> tuple[int, int]:
    """Total and available host memory, capped by the cgroup's limit."""
    fields = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in _lines("/proc/meminfo"))
        if value
    }
    if "MemTotal" in fields:
        total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    else:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _first_line("/sys/fs/cgroup/memory.max"), _first_line("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit))
        available = min(available, max(0, int(limit) - int(used) + _cgroup_reclaimable()))
    return total, available


def _cgroup_reclaimable() -> int:
    """File cache that the cgroup gives back under pressure."""
    stat = dict(line.split() for line in _lines("/sys/fs/cgroup/memory.stat"))
    return int(stat.get("inactive_file", 0))


def _first_line(path: str) -> str:
    return next(iter(_lines(path)), "")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
