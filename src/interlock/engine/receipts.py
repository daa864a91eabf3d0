"""What a rank observed of what it built, by plan item. Values come from live objects, not from the plan."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from interlock.kv.cache import cache_dtype_name
from interlock.parallel.group import Group
from interlock.plan.nccl import mapped_nccl

if TYPE_CHECKING:
    from interlock.engine.model_runner import ModelRunner
    from interlock.engine.scheduler import Scheduler


def observe_runner(runner: ModelRunner) -> dict[str, object]:
    """Receipts of a rank's model, weights, cache, groups and dispatcher."""
    assert runner.source is not None, "receipts are taken after load"
    return {
        "model_path": str(getattr(runner.source, "folder", runner.plan.model_path)),
        "model_family": family_of(runner.model),
        "load_format": runner.source.load_format,
        "qkv_layout": runner.source.report.qkv_layout,
        "device": runner.device.type,
        "kernels": runner.kernels.name,
        "cuda_graph_sizes": () if runner.graphs is None else runner.graphs.captured,
        "threads": getattr(runner.kernels, "threads", torch.get_num_threads()),
        "seed": torch.initial_seed(),
        "tp_size": runner.groups.world.size,
        "attn_dp_size": runner.groups.attn_dp.size,
        **observe_cache(runner),
        **runner.model.observed(),
        **runner.context.moe.observed(),
    }


def observe_cache(runner: ModelRunner) -> dict[str, object]:
    """Receipts of the KV pools, read from the tensors."""
    assert runner.cache is not None, "receipts are taken after load"
    full: list[torch.Tensor] = []
    window: list[torch.Tensor] = []
    for layer, cache in zip(runner.plan.card.layers, runner.cache.layers, strict=True):
        (full if layer.attention.window is None else window).append(cache.k)
    pools = [*full, *window]
    return {
        "page_size": only(pool.shape[1] for pool in pools),
        "full_pages": only(pool.shape[0] for pool in full) if full else 0,
        "window_pages": only(pool.shape[0] for pool in window) if window else 0,
        "kv_cache_dtype": only(cache_dtype_name(pool.dtype) for pool in pools),
    }


def observe_scheduler(scheduler: Scheduler) -> dict[str, object]:
    """Receipts that only the leader of a replica can show."""
    rows, length = scheduler.table.tokens.shape
    return {
        "max_model_len": length,
        "max_running_requests": rows,
        "chunked_prefill_size": scheduler.chunk_size,
        "prefix_cache": scheduler.store.tree is not None,
    }


def observe_devices(device: str, world: Group) -> dict[str, object]:
    """How many ranks compute on this rank's GPU, and the NCCL library in use. Collective over ``world``."""
    if device == "cpu":
        return {"ranks_per_gpu": 1}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    identity = hashlib.sha256(f"{socket.gethostname()} {properties.uuid}".encode()).digest()
    own = torch.frombuffer(bytearray(identity), dtype=torch.uint8).view(1, -1)
    same = (world.all_gather(own) == own).all(dim=1)
    return {
        "ranks_per_gpu": int(same.sum()),
        "nccl_library": ", ".join(map(str, mapped_nccl())),
    }


def family_of(model: object) -> str | None:
    """Name of the registered family whose class ``model`` is."""
    from interlock.models.registry import model_families

    path = f"{type(model).__module__}:{type(model).__qualname__}"
    return next((family.name for family in model_families().values() if family.model == path), None)


def only(values: Iterable[object]) -> object:
    """The one value that all have; a sorted tuple of them, which agrees with nothing, when they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else tuple(sorted(map(str, distinct)))
