"""Launch parameters of dense linears: a JSON table in the package, by shape and number of rows.

Three kernels compute a linear on our own: "stream" (few rows, bound by reading the weight), "tiles" (many
rows, bound by the matrix units) and "simple" (any shape). bfloat16 weights may also take "library", the
vendor's.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

TABLE = "tuned_linear_h200.json"
FAR = 2.0
"""Octaves between shapes (of N plus of K) beyond which an entry says nothing about bfloat16."""


@dataclass(frozen=True, slots=True)
class Simple:
    """``linear_gemm``: a program a tile of ``block_n`` columns, K in ``splits`` shares."""

    block_rows: int
    block_n: int
    splits: int
    stages: int
    warps: int

    def fits(self, width: int, depth: int, weight_dtype: str) -> bool:
        return weight_dtype == "fp8"


@dataclass(frozen=True, slots=True)
class Stream:
    """``linear_stream``: ``stages`` stages of ``boxes`` boxes of 128 bytes of K.

    ``resident`` programs share a multiprocessor; ``weights_first`` and ``early`` as in the kernel.
    """

    block_rows: int
    block_n: int
    boxes: int
    stages: int
    splits: int
    resident: int
    weights_first: bool
    early: bool = False

    def fits(self, width: int, depth: int, weight_dtype: str) -> bool:
        box = 128 if weight_dtype == "fp8" else 64
        known = self.boxes in (2, 4) or weight_dtype != "fp8"
        return known and depth % (box * self.boxes * self.splits) == 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """``linear_tiles``: 128 rows by ``columns``, in bands of ``band`` row blocks.

    ``deep_gemm_from``: rows from which DeepGEMM's product was faster, which is taken where it is compiled for
    just so many (``dense_products``); 0 for never.
    """

    columns: int
    from_registers: bool
    band: int
    stages: int
    deep_gemm_from: int = 0

    def fits(self, width: int, depth: int, weight_dtype: str) -> bool:
        return weight_dtype == "fp8" and -(-width // 128) % (self.columns // 128) == 0


@dataclass(frozen=True, slots=True)
class Library:
    """The vendor's library, for bfloat16."""

    def fits(self, width: int, depth: int, weight_dtype: str) -> bool:
        return weight_dtype == "bfloat16"


LinearConfig = Simple | Stream | Tiles | Library
_KINDS: dict[str, type[LinearConfig]] = {
    "simple": Simple,
    "stream": Stream,
    "tiles": Tiles,
    "library": Library,
}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A weight [N, K]; "fp8" (e4m3 in blocks of 128 x 128) or "bfloat16"."""

    width: int
    depth: int
    weight_dtype: str


Table = tuple[tuple[LinearShape, tuple[tuple[int, LinearConfig], ...]], ...]


def to_json(config: LinearConfig) -> dict[str, Any]:
    kind = next(name for name, known in _KINDS.items() if isinstance(config, known))
    return {"kernel": kind, **asdict(config)}


def from_json(fields: dict[str, Any]) -> LinearConfig:
    """Raises KeyError for a kernel that is not known, TypeError for fields that are not its own."""
    rest = {name: value for name, value in fields.items() if name != "kernel"}
    return _KINDS[fields["kernel"]](**rest)


def parse_table(document: dict[str, Any]) -> Table:
    """(shape, ((rows, config), ...)) for every tuned shape, rows ascending."""
    return tuple(
        (
            LinearShape(**entry["shape"]),
            tuple(sorted((int(rows), from_json(fields)) for rows, fields in entry["by_rows"].items())),
        )
        for entry in document["linear"]
    )


@cache
def load_table() -> Table:
    text = files("interlock.kernels.triton").joinpath(TABLE).read_text(encoding="utf-8")
    return parse_table(json.loads(text))


@cache
def choose(shape: LinearShape, rows: int) -> LinearConfig:
    """Config for ``rows`` rows of x from the nearest tuned shape of the same weight dtype that has one which
    fits; without any, "simple" for fp8 and "library" for bfloat16."""
    return choose_from(load_table(), shape, rows)


def choose_from(table: Table, shape: LinearShape, rows: int) -> LinearConfig:
    """As ``choose``. Of a shape's entries the fewest rows that are not fewer than ``rows`` decide, since a
    block that is too small reads the weight again; beyond the last, the last."""
    near = sorted(
        (entry for entry in table if entry[0].weight_dtype == shape.weight_dtype),
        key=lambda entry: _octaves(entry[0], shape),
    )
    for tuned, by_rows in near:
        if shape.weight_dtype == "bfloat16" and _octaves(tuned, shape) > FAR:
            break
        config = next((config for known, config in by_rows if known >= rows), by_rows[-1][1])
        if config.fits(shape.width, shape.depth, shape.weight_dtype):
            return config if tuned == shape else _elsewhere(config)
    return Library() if shape.weight_dtype == "bfloat16" else simple_config(shape, rows)


def _elsewhere(config: LinearConfig) -> LinearConfig:
    """What a shape takes that was not tuned itself: another library's kernel compiles at start for each
    shape, so it is taken only where it was measured."""
    return replace(config, deep_gemm_from=0) if isinstance(config, Tiles) else config


def simple_config(shape: LinearShape, rows: int, multiprocessors: int = 132) -> Simple:
    """Rows in blocks of at most 64, and K cut into shares until every multiprocessor has two tiles."""
    block_rows = max(16, min(64, 1 << max(0, rows - 1).bit_length()))
    row_blocks = -(-rows // block_rows)
    block_n = 64 if shape.width // 128 * row_blocks < 2 * multiprocessors else 128
    tiles = -(-shape.width // block_n) * row_blocks
    splits = max(1, min(4, shape.depth // 1024, 2 * multiprocessors // tiles))
    return Simple(block_rows, block_n, splits, 4, 4 if block_rows < 64 else 8)


def _octaves(a: LinearShape, b: LinearShape) -> float:
    return abs(math.log2(a.width / b.width)) + abs(math.log2(a.depth / b.depth))
