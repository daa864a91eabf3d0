"""The dispatcher of ``symmetric`` on a CPU: kernels in Triton's interpreter, clock and events taken away."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.symmetric import BACKEND, dispatcher, pulled
from interlock.moe.a2a.symmetric.dispatcher import Symmetric
from interlock.moe.a2a.symmetric.memory import SharedRegion
from interlock.moe.conformance.backend_suite import RankFindings, run_backend_suite
from interlock.moe.terms import Layout, Phase
from interlock.parallel.group import Group
from interlock.parallel.topology import Groups


def take_gpu_away(patch: pytest.MonkeyPatch) -> A2ABackend:
    """The declaration to run the suite with."""
    plain_zeros, combine = torch.zeros, pulled.PulledExchange.combine

    def zeros(*size: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return plain_zeros(*size, **options)  # type: ignore[call-overload, no-any-return]

    def rounded(self: pulled.PulledExchange, results: torch.Tensor, *rest: Any) -> torch.Tensor:
        """The interpreter cuts bfloat16 off instead of rounding."""
        return combine(self, results, *rest, out_dtype=torch.float32).to(results.dtype)

    done = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    on_cpu = replace(BACKEND, devices=frozenset({"cpu"}), packages=())
    patch.setattr(torch, "zeros", zeros)
    patch.setattr(torch.cuda, "Event", lambda: done)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    patch.setattr(dispatcher, "_indexed", lambda device: device)
    patch.setattr(dispatcher, "_multiprocessors", lambda device: 100)
    patch.setattr(dispatcher, "BACKEND", on_cpu)
    patch.setattr(pulled, "TAKING_PROGRAMS", 6)
    patch.setattr(pulled, "PUBLISHERS", 4)
    patch.setattr(pulled, "COPY_WORKERS", 6)
    patch.setattr(pulled, "SCAN", 64)
    patch.setattr(pulled.PulledExchange, "combine", rounded)
    return on_cpu


def share_files(patch: pytest.MonkeyPatch, folder: str) -> None:
    """Regions are files that every rank maps, at addresses of its own."""
    numbers = count()

    def share(group: Group, size: int, device: torch.device) -> SharedRegion:
        number = next(numbers)
        paths = [Path(folder) / f"{number}.{rank}" for rank in range(group.size)]
        with paths[group.rank].open("wb") as file:
            file.truncate(size)
        group.barrier()
        maps = [torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths]
        return SharedRegion(maps[group.rank], tuple(each.data_ptr() for each in maps), maps)

    patch.setattr(dispatcher, "share_region", share)


def conformance(groups: Groups, folder: str, cases: int, seed: int) -> RankFindings:
    with pytest.MonkeyPatch.context() as patch:
        on_cpu = take_gpu_away(patch)
        share_files(patch, folder)
        ranks = groups.ep.size
        return run_backend_suite(on_cpu, groups, device="cpu", cases=cases, seed=seed, ranks_per_gpu=ranks)


def layers_in_a_row(groups: Groups, folder: str, layers: int, spec: DispatcherSpec) -> int:
    """Tokens that are wrong after layers of experts that double their rows, without a pause between.

    Layers are of decode, but for each fifth; a step in six is given up.
    """
    with pytest.MonkeyPatch.context() as patch:
        take_gpu_away(patch)
        share_files(patch, folder)
        dispatched = Symmetric(replace(spec, groups=groups, rank=groups.ep.rank))
        generator = torch.Generator().manual_seed(groups.ep.rank)
        x = torch.randint(-8, 9, (spec.capacity[Phase.DECODE], spec.hidden_size), generator=generator)
        hidden = x.bfloat16()
        weights = torch.ones(len(hidden), spec.top_k)
        for layer in range(layers):
            ids = torch.full((len(hidden), spec.top_k), -1)
            ids[:, layer % spec.top_k] = torch.randint(
                0, spec.num_experts, (len(hidden),), generator=generator
            )
            phase = Phase.PREFILL if layer % 5 == 4 else Phase.DECODE
            if layer % 6 == 5:
                dispatched.release(dispatched.dispatch(hidden, ids, weights, phase).handle)
            taken = dispatched.dispatch(hidden, ids, weights, phase)
            hidden = dispatched.combine(taken.rows.rows * (2.0, 0.5)[layer % 2], taken.handle)
        dispatched.check()
        wrong = int((hidden != x.bfloat16()).any(1).sum())
        dispatched.close()
        return wrong


LAYOUTS = {Phase.PREFILL: Layout.CONTIGUOUS, Phase.DECODE: Layout.MASKED}
