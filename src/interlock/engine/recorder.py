"""Writes down what the layers of one rank compute in a step that ``verify`` inspects.

Each rank writes one safetensors file a step into the trace folder, for the rows of the inspected request:

- ``positions`` int64 [r] and, from the leader of the replica, ``attention.<layer>``, ``mlp.<layer>`` [r, h];
- ``routed.<layer>`` int64 [m], positions of the rows that this rank routed, with ``ids.<layer>`` [m, k],
  ``weights.<layer>`` [m, k], ``logits.<layer>`` and ``choice.<layer>`` [m, E], the scores that the choice
  went by, and ``reach.<layer>`` [m], how large a logit can be.

``interlock.verify.trace`` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from interlock.engine.inspection import StepInspection
from interlock.moe.routing import Router, Routes
from interlock.parallel.topology import Groups
from interlock.step import Step


@contextmanager
def recorded(model: Any, groups: Groups, step: Step, inspection: str) -> Iterator[None]:
    """Inside, ``model`` (a ``Decoder``) tells a recorder what it computes; at the end it is written."""
    recorder = StepRecorder(step, msgspec.json.decode(inspection, type=StepInspection), groups)
    model.observe(recorder)
    try:
        yield
    finally:
        model.observe(None)
    recorder.write()


class StepRecorder:
    """A ``LayerObserver`` for one step of one rank."""

    def __init__(self, step: Step, asked: StepInspection, groups: Groups) -> None:
        self._asked = asked.request
        self._is_leader = groups.attn_tp.rank == 0
        self._rank = groups.world.rank
        positions = step.positions.cpu()
        rows = torch.arange(asked.start, asked.end)
        kept = (positions[rows] >= self._asked.first) & (positions[rows] < self._asked.last)
        self._rows = rows[kept]
        self._positions = positions
        self._span = (asked.start, asked.end)
        self._forced = load_file(self._asked.routes) if self._asked.routes else {}
        self._tensors = {"positions": positions[self._rows].clone()}

    def computed(self, layer: int, part: str, output: torch.Tensor) -> None:
        if self._is_leader and self._asked.trace:
            self._tensors[f"{part}.{layer}"] = output[self._rows.to(output.device)].cpu()

    def routed(
        self, layer: int, first_row: int, hidden: torch.Tensor, router: Router, routes: Routes
    ) -> Routes:
        if f"ids.{layer}" in self._forced:
            routes = self._force(layer, first_row, routes)
        if self._asked.trace:
            self._keep_routes(layer, first_row, hidden, router, routes)
        return routes

    def write(self) -> None:
        """Write the step's file; nothing when only routes were forced."""
        if not self._asked.trace or not len(self._rows):
            return
        last = int(self._tensors["positions"][-1])
        path = Path(self._asked.trace) / f"rank{self._rank}-{last:08d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in self._tensors.items()}, path)

    def _keep_routes(
        self, layer: int, first_row: int, hidden: torch.Tensor, router: Router, routes: Routes
    ) -> None:
        rows = self._rows - first_row
        rows = rows[(rows >= 0) & (rows < hidden.shape[0])]
        own = rows.to(hidden.device)
        self._tensors[f"routed.{layer}"] = self._positions[rows + first_row].clone()
        self._tensors[f"ids.{layer}"] = routes.ids[own].cpu()
        self._tensors[f"weights.{layer}"] = routes.weights[own].cpu()
        self._tensors[f"logits.{layer}"] = router.logits(hidden)[own].cpu()
        self._tensors[f"choice.{layer}"] = router.scores(hidden)[1][own].cpu()
        self._tensors[f"reach.{layer}"] = router.reach(hidden)[own].cpu()

    def _force(self, layer: int, first_row: int, routes: Routes) -> Routes:
        """Take ids and weights of the file for the positions that it knows, of the inspected request only."""
        known = {position: row for row, position in enumerate(self._forced[f"routed.{layer}"].tolist())}
        ids, weights = routes.ids.clone(), routes.weights.clone()
        start, end = self._span
        for row in range(max(start, first_row), min(end, first_row + ids.shape[0])):
            source = known.get(int(self._positions[row]))
            if source is not None:
                ids[row - first_row] = self._forced[f"ids.{layer}"][source].to(ids.device)
                weights[row - first_row] = self._forced[f"weights.{layer}"][source].to(ids.device)
        return Routes(ids=ids, weights=weights)
