"""Reads what ``engine/recorder.py`` wrote: the layers' outputs and routes of one request, by position."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROUTE_TENSORS = ("ids", "weights", "choice", "logits", "reach")


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """Routes of one MoE layer.

    Attributes:
        ids: int64 [p, k]; weights: float32 [p, k].
        choice: float32 [p, E], the scores that the choice went by.
        logits: float32 [p, E]; reach: float32 [p], how large a logit can be.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    choice: torch.Tensor
    logits: torch.Tensor
    reach: torch.Tensor


@dataclass(frozen=True, slots=True)
class Trace:
    """What one arm computed.

    Attributes:
        positions: int64 [p], ascending.
        outputs: (layer, "attention" or "mlp") -> [p, h], before it joins the residual stream.
        routes: by layer.
    """

    positions: torch.Tensor
    outputs: dict[tuple[int, str], torch.Tensor]
    routes: dict[int, LayerRoutes]

    @property
    def layers(self) -> range:
        return range(1 + max((layer for layer, _ in self.outputs), default=-1))


def read_trace(folder: Path) -> Trace:
    """Merge the files of all ranks and steps; the last computation of a position counts."""
    rows: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for path in sorted(
        folder.glob("rank*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.name)
    ):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            kind, _, layer = name.partition(".")
            if kind in ("positions", "routed"):
                continue
            owners = tensors["positions" if kind in ("attention", "mlp") else f"routed.{layer}"].tolist()
            rows[name].update(zip(owners, tensor, strict=True))
    positions = sorted({p for name, values in rows.items() if name.startswith("attention.") for p in values})
    stacked = {name: torch.stack([values[p] for p in positions]) for name, values in rows.items()}
    layers = sorted({int(name.partition(".")[2]) for name in stacked if name.startswith("ids.")})
    return Trace(
        positions=torch.tensor(positions, dtype=torch.int64),
        outputs={
            (int(name.partition(".")[2]), name.partition(".")[0]): tensor
            for name, tensor in stacked.items()
            if name.startswith(("attention.", "mlp."))
        },
        routes={
            layer: LayerRoutes(*(stacked[f"{name}.{layer}"] for name in ROUTE_TENSORS)) for layer in layers
        },
    )


def write_routes(trace: Trace, path: Path) -> None:
    """The choices of ``trace`` as a file that ``Inspection.routes`` takes."""
    tensors = {}
    for layer, routes in trace.routes.items():
        tensors[f"routed.{layer}"] = trace.positions.clone()
        tensors[f"ids.{layer}"] = routes.ids.contiguous()
        tensors[f"weights.{layer}"] = routes.weights.contiguous()
    save_file(tensors, path)
