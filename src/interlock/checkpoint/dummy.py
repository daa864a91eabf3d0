"""Weights made up from a seed, for benchmarks: no tensor is read, and routing is spread over the experts.

What collapses routing in usual dummy weights: tiny uniform values leave every router logit near 0 (ties go to
the first experts); large ones saturate the sigmoid in wide models (ties again); undamped residual updates
make all tokens alike in deep models. Here each linear keeps the variance of its input, so router logits have
standard deviation 1 at any width, and updates of the residual stream shrink with depth, so the embedding of
the token itself keeps deciding its experts. One pool of random numbers is tiled into all large tensors, which
costs a memory copy instead of a random draw for each weight and gives every shard the values of its rows. On
a GPU the pool lies there, and all experts of a layer are written by a few launches (``DummyExperts``).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence

import torch

from interlock.checkpoint.reader import bands
from interlock.checkpoint.source import Progress, no_progress
from interlock.checkpoint.specs import TensorSpec
from interlock.checkpoint.validate import LoadReport
from interlock.kernels.fp8_blocks import BLOCK, Fp8Blocks
from interlock.plan.card import ModelCard

POOL_SIZE = 1_048_573
"""Prime, so that rows of any width start at different places of the pool."""
FP8_UNIT = 1 / 64
"""Scale of a block, in standard deviations of its values: e4m3 (up to 448) then holds 7 of them."""
_EXPERT = re.compile(r"(?P<layer>.*\.)experts\.(?P<expert>\d+)\.(?P<kind>gate|up|down)_proj\.weight")


class DummyWeights:
    """A WeightSource whose values depend on the seed and the tensor's name only, not on how it is sharded nor
    on the device. Tensors that the model's checkpoints store as fp8 are drawn as e4m3 with one scale.

    Args:
        device: where the tensors are made.
    """

    load_format = "dummy"

    def __init__(
        self,
        card: ModelCard,
        *,
        seed: int = 0,
        progress: Progress = no_progress,
        device: torch.device | str = "cpu",
    ) -> None:
        self._card = card
        self._seed = seed
        self._device = torch.device(device)
        self._specs: dict[str, TensorSpec] = {}
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(POOL_SIZE, generator=generator)
        self._normal = normal.to(self._device)
        self._fp8 = (normal / FP8_UNIT).clamp(-448, 448).to(torch.float8_e4m3fn).to(self._device)
        self._pools: dict[tuple[float, torch.dtype, bool], torch.Tensor] = {}
        self.progress = progress
        self.report = LoadReport(qkv_layout="plain" if card.fused_qkv else "split")

    def close(self) -> None:
        """Free the pools."""
        self._pools.clear()

    def validate(self, specs: Sequence[TensorSpec], skipped_prefixes: Sequence[str]) -> LoadReport:
        self._specs = {spec.name: spec for spec in specs if not spec.optional}
        self.report.quantised = sum(self.is_fp8(name) for name in self._specs)
        return self.report

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def is_fp8(self, name: str) -> bool:
        return self._specs[name].stored_fp8(self._card.weight_format, self._card.fp8_except)

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
            return torch.ones(count, dtype=dtype, device=self._device)
        if spec.role == "bias":
            return torch.zeros(count, dtype=dtype, device=self._device)
        if spec.role == "router":
            drawn = self._independent(spec)[[row for run in runs for row in run]]
            return drawn.to(self._device, dtype)
        pool = self._pool(self._std(spec), dtype, self.is_fp8(name))
        return self._gather(spec, pool, runs, columns)

    def read_fp8(
        self, name: str, *, rows: Sequence[range] | None = None, columns: range | None = None
    ) -> Fp8Blocks:
        spec = self._specs[name]
        values = self._gather(spec, self._fp8, [range(spec.shape[0])] if rows is None else rows, columns)
        grid = (-(-values.shape[0] // BLOCK), -(-values.shape[1] // BLOCK))
        return Fp8Blocks(values, torch.full(grid, self._std(spec) * FP8_UNIT, device=self._device))

    def expert_fill(self, prefix: str, first_expert: int) -> DummyExperts:
        return DummyExperts(self, prefix, first_expert)

    def fill(self, values: torch.Tensor, scales: torch.Tensor | None, spec: TensorSpec, first: int) -> None:
        """Write a contiguous tensor with the values that follow place ``first`` of the tiled pool."""
        if scales is None:
            fp8 = spec.stored_fp8(self._card.weight_format, self._card.fp8_except)
            tile_into(values, self._pool(self._std(spec), values.dtype, fp8), first)
        else:
            tile_into(values, self._fp8, first)
            scales.fill_(self._std(spec) * FP8_UNIT)

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def origin(self, spec: TensorSpec) -> int:
        """Place of a tensor's first value. The experts of a layer follow each other: gate and up of one, gate
        and up of the next, ...; and so do their down projections."""
        found = _EXPERT.fullmatch(spec.name)
        if found is None:
            return zlib.crc32(spec.name.encode())
        kind, expert = found["kind"], int(found["expert"])
        base = zlib.crc32(f"{found['layer']}{'down' if kind == 'down' else 'gate_up'}".encode())
        if kind == "down":
            return base + expert * spec.numel
        return base + (2 * expert + (kind == "up")) * spec.numel

    def _pool(self, std: float, dtype: torch.dtype, fp8: bool) -> torch.Tensor:
        """The pool in ``dtype``, as it would come from fp8 blocks where a checkpoint has them."""
        key = (std, dtype, fp8)
        if key not in self._pools:
            pool = self._fp8.float() * (std * FP8_UNIT) if fp8 else self._normal * std
            self._pools[key] = pool.to(dtype)
        return self._pools[key]

    def _gather(
        self, spec: TensorSpec, pool: torch.Tensor, runs: Sequence[range], columns: range | None
    ) -> torch.Tensor:
        """Rows of a large tensor: consecutive values of the pool, which starts anew when it ends."""
        width, origin = spec.shape[1], self.origin(spec)
        count = sum(map(len, runs))
        out_width = width if columns is None else len(columns)
        out = torch.empty(count, out_width, dtype=pool.dtype, device=self._device)
        done = 0
        for part in runs if columns is None else bands(runs, width):
            target = out[done : done + len(part)]
            if columns is None:
                tile_into(target, pool, origin + part.start * width)
            else:
                whole = torch.empty(len(part), width, dtype=pool.dtype, device=self._device)
                tile_into(whole, pool, origin + part.start * width)
                _bits(target).copy_(_bits(whole)[:, columns.start : columns.stop])
            done += len(part)
        return out

    def _independent(self, spec: TensorSpec) -> torch.Tensor:
        """Router rows must not be shifted copies of each other: drawn one by one."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + zlib.crc32(spec.name.encode()))
        return torch.randn(spec.shape, generator=generator) / math.sqrt(spec.shape[1])

    def _std(self, spec: TensorSpec) -> float:
        if spec.role == "embedding":
            return 1.0
        damping = 2 * self._card.num_layers if spec.role == "output" else 1
        return 1.0 / math.sqrt(damping * spec.shape[1])


class DummyExperts:
    """Writes all experts of one layer that a rank holds (an ``ExpertFill``): the values that ``read`` gives.

    Args:
        prefix: of the layer's MLP.
        first_expert: global id of the rank's first expert.
    """

    def __init__(self, source: DummyWeights, prefix: str, first_expert: int) -> None:
        self._source = source
        self._gate, self._down = (
            source.spec(f"{prefix}experts.{first_expert}.{kind}_proj.weight") for kind in ("gate", "down")
        )

    def gate_up(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """See ``ExpertFill.gate_up``."""
        self._source.fill(values, scales, self._gate, self._source.origin(self._gate))

    def down(self, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """See ``ExpertFill.down``."""
        self._source.fill(values, scales, self._down, self._source.origin(self._down))


def tile_into(out: torch.Tensor, pool: torch.Tensor, first: int) -> None:
    """Fill contiguous ``out`` with pool[first], pool[first + 1], ..., starting anew where the pool ends: at
    most three launches, whatever the size."""
    flat, pool = _bits(out).view(-1), _bits(pool)
    first %= len(pool)
    head = min(len(pool) - first, len(flat))
    flat[:head] = pool[first : first + head]
    rest = flat[head:]
    rounds = len(rest) // len(pool)
    if rounds:
        rest[: rounds * len(pool)].view(rounds, len(pool)).copy_(pool.expand(rounds, -1))
    tail = rest[rounds * len(pool) :]
    tail.copy_(pool[: len(tail)])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as bytes, which every copy kernel takes; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
