"""Tuned launch parameters: a JSON table in the package; a shape that is not in it takes the nearest entry."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

TABLE = "tuned_h200.json"


@dataclass(frozen=True, slots=True)
class Tile:
    """One GEMM's launch: ``block_n`` weight rows by ``block_k`` channels a step, ``stages`` steps in
    flight."""

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Launch parameters of one MoE layer; both GEMMs share the row blocks.

    ``pipelined``: use the persistent kernels for many tokens where they apply (fp8, 128 rows a block).
    """

    block_rows: int
    gate_up: Tile
    down: Tile
    pipelined: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> MoeConfig:
        return MoeConfig(
            fields["block_rows"],
            Tile(**fields["gate_up"]),
            Tile(**fields["down"]),
            fields.get("pipelined", False),
        )


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What a table entry was tuned for: E local experts of width i on hidden size h; "fp8" or "bfloat16"."""

    experts: int
    hidden_size: int
    intermediate_size: int
    weight_dtype: str


@cache
def load_table() -> tuple[tuple[MoeShape, tuple[tuple[int, MoeConfig], ...]], ...]:
    """(shape, ((routed rows, config), ...)) for every tuned shape, rows ascending."""
    text = files("interlock.kernels.triton").joinpath(TABLE).read_text(encoding="utf-8")
    return parse_table(json.loads(text))


def parse_table(
    document: dict[str, Any],
) -> tuple[tuple[MoeShape, tuple[tuple[int, MoeConfig], ...]], ...]:
    entries = []
    for entry in document["moe"]:
        by_rows = {int(rows): MoeConfig.from_json(fields) for rows, fields in entry["by_rows"].items()}
        entries.append((MoeShape(**entry["shape"]), tuple(sorted(by_rows.items()))))
    return tuple(entries)


def nearest(
    table: tuple[tuple[MoeShape, tuple[tuple[int, MoeConfig], ...]], ...], shape: MoeShape, rows: int
) -> MoeConfig:
    """Config of the nearest tuned shape of the same weight dtype, at the nearest number of routed rows.

    Shapes are compared by the octaves between their sizes; rows by the octaves between rows for each expert,
    so that a slice of the experts finds what suits its share.
    """
    candidates = [entry for entry in table if entry[0].weight_dtype == shape.weight_dtype]
    if not candidates:
        raise KeyError(f"no tuned entry has weight dtype {shape.weight_dtype}")
    tuned, by_rows = min(candidates, key=lambda entry: _distance(entry[0], shape))
    share = max(rows, 1) / shape.experts
    return min(by_rows, key=lambda item: abs(math.log2(item[0] / tuned.experts / share)))[1]


def _distance(a: MoeShape, b: MoeShape) -> float:
    return (
        abs(math.log2(a.hidden_size / b.hidden_size))
        + abs(math.log2(a.intermediate_size / b.intermediate_size))
        + 0.25 * abs(math.log2(a.experts / b.experts))
    )
