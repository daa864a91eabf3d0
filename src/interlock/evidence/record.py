"""Fills evidence from plans, receipts and the machine, the same way for ``verify`` and ``bench``."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from interlock.evidence.schema import Arm, DeviceFacts, Evidence, ModelFacts, arm_plan
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.rehearsal import REHEARSAL, sharing_notice


def now() -> str:
    """This moment, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def interlock_version() -> str:
    """Version of the installed distribution, "unknown" in a source tree that is not installed."""
    try:
        return version("interlock")
    except PackageNotFoundError:
        return "unknown"


def model_facts(plan: LaunchPlan) -> ModelFacts:
    """What a record says of the model."""
    card = plan.card
    return ModelFacts(
        name=_last_part(plan.model),
        family=card.family,
        architecture=card.architecture,
        config_hash=card.config_hash,
        weight_format=card.weight_format,
        parameters=card.parameters,
    )


def host_facts(facts: MachineFacts) -> DeviceFacts:
    """The CPU of this machine."""
    return DeviceFacts(
        kind="cpu",
        name=_cpu_name() or facts.architecture,
        key=f"cpu {facts.architecture}",
        memory_total=facts.memory_total,
        os=facts.os,
        python=facts.python,
        cores=facts.cores,
    )


def device_facts(plan: LaunchPlan, facts: MachineFacts) -> DeviceFacts:
    """The device that ``plan`` computes on, from what was probed of this machine."""
    return device_of(plan.device, plan.gpus, facts)


def device_of(kind: str, count: int, facts: MachineFacts) -> DeviceFacts:
    """``count`` devices of this machine, or its CPU."""
    if kind == "cpu" or not facts.devices:
        return msgspec.structs.replace(host_facts(facts), kind=kind)
    first = facts.devices[0]
    return DeviceFacts(
        kind=kind,
        name=first.name,
        key=first.name,
        count=count,
        memory_total=first.memory_total,
        driver=_nvidia_driver(),
        os=facts.os,
        python=facts.python,
        cores=facts.cores,
    )


def said_rehearsals(evidence: Evidence) -> tuple[str, ...]:
    """What the notes of ``evidence`` say of ranks that shared GPUs."""
    return tuple(note for note in evidence.notes if note.startswith(REHEARSAL))


def rehearsal_notes(arms: Iterable[Arm]) -> tuple[str, ...]:
    """What must be said of arms whose ranks shared GPUs, each sentence once."""
    sizes = (arm_plan(arm).get("ranks_per_gpu") or 1 for arm in arms)
    return tuple(filter(None, dict.fromkeys(map(sharing_notice, sizes))))


def recorded_arm(
    name: str,
    options: str,
    plan: LaunchPlan,
    receipts: Mapping[int, Mapping[str, object]],
) -> Arm:
    """An arm that was started here. Of this machine's folders only the last part is recorded."""
    return Arm(
        name=name,
        options=options,
        plan=_without_folders(msgspec.to_builtins(plan, enc_hook=str), plan),
        receipts={
            str(rank): _without_folders(msgspec.to_builtins(dict(items), enc_hook=str), plan)
            for rank, items in receipts.items()
        },
    )


def _without_folders(items: dict[str, Any], plan: LaunchPlan) -> dict[str, Any]:
    """Replace the checkpoint's folder by its last part, wherever it is a value or within a reason."""
    folders = {text for text in (plan.model_path, plan.model, plan.nccl_library) if "/" in text}
    cleaned: dict[str, Any] = _replaced(items, folders)
    return cleaned


def _replaced(value: Any, folders: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, folders) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, folders) for item in value]
    if isinstance(value, str):
        for folder in sorted(folders, key=len, reverse=True):
            value = value.replace(folder, _last_part(folder))
    return value


def _last_part(path: str) -> str:
    return Path(path).name if "/" in path else path


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _nvidia_driver() -> str:
    """Version of the NVIDIA driver through NVML, "" where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if nvml.nvmlInit_v2() != 0:
        return ""
    try:
        text = ctypes.create_string_buffer(80)
        return text.value.decode() if nvml.nvmlSystemGetDriverVersion(text, 80) == 0 else ""
    finally:
        nvml.nvmlShutdown()
