"""Where and in what the ranks compute: device, kernels, threads and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from interlock.errors import Refusal
from interlock.kernels.availability import capability_of
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.decided import Decided, asked_integer, asked_text, from_model, rule
from interlock.plan.facts import MachineFacts
from interlock.plan.kernel_choice import NATIVE, REFERENCE, TRITON, decide_kernels
from interlock.plan.topology import World

FP8_CACHE: Final = "fp8_e4m3"
FP8_CACHE_SCALE: Final = "every value has scale 1, uncalibrated: what is beyond 448 is clamped"
FP8_CONVERSION: Final = (8, 9)
"""Least compute capability with instructions that convert e4m3."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The items of this module."""

    device: Decided[str]
    kernels: Decided[str]
    threads: Decided[int]
    dtype: Decided[str]
    kv_cache_dtype: Decided[str]

    def items(self) -> dict[str, Decided[Any]]:
        return {
            "device": self.device,
            "kernels": self.kernels,
            "threads": self.threads,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
        }


def decide_compute(options: Options, card: ModelCard, facts: MachineFacts, world: World) -> Compute:
    """Device, kernels, threads and dtypes that exist on this machine."""
    device = _device(options, facts, world)
    dtype = asked_text(options, "dtype") or from_model(card.dtype, "the checkpoint's own")
    kernels = decide_kernels(options, facts, device.value, world.local_ranks)
    kv_dtype = _kv_cache_dtype(options, facts, world, kernels.value, dtype.value)
    return Compute(device, kernels, _threads(options, facts, world, kernels.value), dtype, kv_dtype)


def _kv_cache_dtype(
    options: Options, facts: MachineFacts, world: World, kernels: str, dtype: str
) -> Decided[str]:
    """As asked, or as activations; fp8 (without a scale) where the kernels can convert it."""
    asked = asked_text(options, "kv_cache_dtype")
    if asked is None:
        return rule(dtype, "as --dtype")
    problem = None
    if asked.value == FP8_CACHE and kernels == NATIVE:
        problem = f"--kernels {NATIVE} cache keys and values in float32 or bfloat16"
    elif asked.value == FP8_CACHE and kernels == TRITON:
        for found in facts.devices[: world.local_ranks]:
            if capability_of(found.capability) < FP8_CONVERSION:
                problem = f"a GPU of compute capability {found.capability} cannot convert it; 8.9 or more can"
    if problem:
        raise Refusal(
            option="--kv-cache-dtype",
            given=asked.value,
            rule=problem,
            alternatives=["--kv-cache-dtype auto", f"--kernels {REFERENCE}"],
        )
    if asked.value == FP8_CACHE:
        return Decided(asked.value, asked.source, f"{asked.reason}; {FP8_CACHE_SCALE}")
    return asked


def _device(options: Options, facts: MachineFacts, world: World) -> Decided[str]:
    asked = asked_text(options, "device")
    count, needed, sharing = len(facts.devices), world.local_gpus, world.ranks_per_gpu.value
    torch_version = facts.packages.get("torch", "")
    problem = None
    if count < needed:
        problem = f"{world.local_ranks} ranks of this machine need {needed} GPUs; {count} found"
    elif torch_version.endswith("+cpu"):
        problem = f"torch {torch_version} is a build without CUDA"
    if sharing > 1 and asked is not None and asked.value == "cpu":
        problem = "with --device cpu there is none"
    if sharing > 1 and problem:
        raise Refusal(
            option="--ranks-per-gpu",
            given=sharing,
            rule=f"ranks share GPUs, and {problem}; on a CPU the ranks share the machine without this option",
            alternatives=["--ranks-per-gpu 1"],
        )
    if asked is not None and asked.value == "cuda" and problem:
        alternatives = ["--device cpu"]
        if 0 < count < needed and not torch_version.endswith("+cpu"):
            alternatives.append(f"--tp-size {count * world.nnodes.value}")
            if needed % count == 0:
                alternatives.append(f"--ranks-per-gpu {needed // count}")
        raise Refusal(option="--device", given="cuda", rule=problem, alternatives=alternatives)
    if asked is not None:
        return asked
    if problem:
        return rule("cpu", problem if count else "no GPU found")
    return rule("cuda", f"{count} GPUs found for {world.local_ranks} ranks")


def _threads(options: Options, facts: MachineFacts, world: World, kernels: str) -> Decided[int]:
    asked = asked_integer(options, "threads")
    if asked is not None and asked.value > 1 and kernels == TRITON:
        raise Refusal(
            option="--threads",
            given=asked.value,
            rule=f"--kernels {TRITON} compute on the GPU: one host thread launches them",
            alternatives=["--threads auto", f"--kernels {REFERENCE}"],
        )
    if asked is not None:
        return asked
    if kernels == TRITON:
        return rule(1, "the GPU computes, one host thread launches")
    threads = max(1, facts.cores // world.local_ranks)
    return rule(threads, f"{facts.cores} cores for {world.local_ranks} ranks of this machine")
