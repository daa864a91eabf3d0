"""Weights made up from a seed, for benchmarks: no tensor is read, and routing is spread over the experts.

What collapses routing in usual dummy weights: tiny uniform values leave every router logit near 0 (ties go to
the first experts); large ones saturate the sigmoid in wide models (ties again); undamped residual updates
make all tokens alike in deep models. Here each linear keeps the variance of its input, so router logits have
standard deviation 1 at any width, and updates of the residual stream shrink with depth, so the embedding of
the token itself keeps deciding its experts. One pool of random numbers is tiled into all large tensors, which
costs a memory copy instead of a random draw for each weight and gives every shard the values of its rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch

from interlock.checkpoint.reader import bands
from interlock.checkpoint.source import Progress, no_progress
from interlock.checkpoint.specs import TensorSpec
from interlock.checkpoint.validate import LoadReport
from interlock.plan.card import ModelCard

POOL_SIZE = 1_048_573
"""Prime, so that rows of any width start at different places of the pool."""


class DummyWeights:
    """A WeightSource whose values depend on the seed and the tensor's name only, not on how it is sharded."""

    load_format = "dummy"

    def __init__(self, card: ModelCard, *, seed: int = 0, progress: Progress = no_progress) -> None:
        self._card = card
        self._seed = seed
        self._specs: dict[str, TensorSpec] = {}
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(POOL_SIZE, generator=generator)
        self.progress = progress
        self.report = LoadReport(qkv_layout="plain" if card.fused_qkv else "split")

    def close(self) -> None:
        """Nothing is open."""

    def validate(self, specs: Sequence[TensorSpec], skipped_prefixes: Sequence[str]) -> LoadReport:
        self._specs = {spec.name: spec for spec in specs if not spec.optional}
        return self.report

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def read(
        self,
        name: str,
        *,
        rows: Sequence[range] | None = None,
        columns: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        spec = self._specs[name]
        runs = [range(spec.shape[0])] if rows is None else rows
        count = sum(map(len, runs))
        if spec.role == "norm":
            return torch.ones(count, dtype=dtype)
        if spec.role == "bias":
            return torch.zeros(count, dtype=dtype)
        if spec.role == "router":
            return self._independent(spec)[[row for run in runs for row in run]].to(dtype)
        out = torch.empty(count, spec.shape[1] if columns is None else len(columns), dtype=dtype)
        width = slice(None) if columns is None else slice(columns.start, columns.stop)
        done = 0
        for band in bands(runs, spec.shape[1]):
            out[done : done + len(band)] = self._values(spec, band)[:, width]
            done += len(band)
        return out

    def _independent(self, spec: TensorSpec) -> torch.Tensor:
        """Router rows must not be shifted copies of each other: drawn one by one."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + zlib.crc32(spec.name.encode()))
        return torch.randn(spec.shape, generator=generator) / math.sqrt(spec.shape[1])

    def _values(self, spec: TensorSpec, rows: range) -> torch.Tensor:
        """Rows of a large tensor, float32: consecutive values of the pool, which starts anew when it ends."""
        width = spec.shape[1]
        first = (zlib.crc32(spec.name.encode()) + rows.start * width) % POOL_SIZE
        flat = torch.empty(len(rows) * width)
        filled = 0
        while filled < len(flat):
            piece = self._pool[first : first + len(flat) - filled]
            flat[filled : filled + len(piece)] = piece
            filled, first = filled + len(piece), 0
        flat.mul_(self._std(spec))
        return flat.view(len(rows), width)

    def _std(self, spec: TensorSpec) -> float:
        if spec.role == "embedding":
            return 1.0
        damping = 2 * self._card.num_layers if spec.role == "output" else 1
        return 1.0 / math.sqrt(damping * spec.shape[1])
