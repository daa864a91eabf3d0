"""Tuned launch parameters of attention: a JSON table in the package, written by
``benchmarks/gpu_tune_attention.py``. No Triton here."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

TABLE = "tuned_attention_h200.json"
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How attention is launched.

    Attributes:
        rows: query rows (tokens x heads of a group) of a program in prefill; decode takes what a token needs.
        keys_a_step: keys of one step of a program.
        warps, stages: of Triton's launch.
        programs: programs aimed at in decode, by splitting the keys of a sequence; 0 never splits.
        split_keys: keys that a split has at least.
        specialised: prefill by persistent programs with specialised warps, where they apply.
        ids_ahead: decode reads the page numbers of a step one step before.
    """

    rows: int
    keys_a_step: int
    warps: int
    stages: int
    programs: int = 0
    split_keys: int = 256
    specialised: bool = False
    ids_ahead: bool = False

    def key_splits(self, programs: int, max_keys: int) -> int:
        """How many programs share the keys of one sequence and head, from static sizes only."""
        return max(1, min(64, self.programs // max(programs, 1), -(-max_keys // self.split_keys)))


PLAIN = {"decode": AttentionTile(16, 64, 4, 2, 528), "prefill": AttentionTile(128, 64, 8, 2)}
"""For float32 and for heads beyond those that were tuned."""


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """Tiles by the load they were tuned at: sequences x kv heads in decode, tokens in prefill."""

    by_kind: dict[tuple[Phase, bool], tuple[tuple[int, AttentionTile], ...]]

    def nearest(self, phase: Phase, windowed: bool, load: int) -> AttentionTile:
        tiles = self.by_kind.get((phase, windowed))
        if not tiles:
            return PLAIN[phase]
        return min(tiles, key=lambda item: abs(math.log2(item[0] / max(load, 1))))[1]


def entry(phase: Phase, windowed: bool, by_load: dict[int, AttentionTile]) -> dict[str, Any]:
    """One entry of the table's JSON."""
    tiles = {str(load): asdict(tile) for load, tile in sorted(by_load.items())}
    return {"phase": phase, "windowed": windowed, "by_load": tiles}


def parse_table(document: dict[str, Any]) -> AttentionTable:
    by_kind: dict[tuple[Phase, bool], tuple[tuple[int, AttentionTile], ...]] = {}
    for item in document["attention"]:
        tiles = {int(load): AttentionTile(**fields) for load, fields in item["by_load"].items()}
        by_kind[item["phase"], item["windowed"]] = tuple(sorted(tiles.items()))
    return AttentionTable(by_kind)


@cache
def load_table() -> AttentionTable:
    text = files("interlock.kernels.triton").joinpath(TABLE).read_text(encoding="utf-8")
    return parse_table(json.loads(text))
