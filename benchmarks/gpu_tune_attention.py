"""Tune paged attention on a GPU: check candidates, time them beside the kernel before tuning, keep the best.

    python benchmarks/gpu_tune_attention.py --out results

Heads of MiMo-V2-Flash: 64 query heads, 192 / 128 channels, 4 kv heads (full) or 8 (window 128, sinks), pages
of 16, tables for 9,216 keys. Every candidate is compiled and compared with a float64 reference in a process
of its own, so one that fails is named and skipped. Writes ``tuned_attention_h200.json`` (the table that
``attention_tiles.py`` reads) and ``attention_tuning.json`` (all times).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import attention_before
from gpu_timing import bandwidth, time_graph

from interlock.kernels.torch_reference import TorchKernels
from interlock.kernels.triton import attention, rope
from interlock.kernels.triton.attention_tiles import AttentionTile, Phase, entry

HEADS, WIDTH, VALUE_WIDTH, PAGE, WINDOW, MAX_KEYS = 64, 192, 128, 16, 128, 9216
BF16 = torch.bfloat16
BOUND = 1e-2
SLACK = 0.02
"""A tile that another size already takes is taken again unless this share is lost: each compiles at start."""


def tile_name(tile: AttentionTile) -> str:
    special = "ws" if tile.specialised else "a" if tile.ids_ahead else "t"
    split = f"p{tile.programs}k{tile.split_keys}" if tile.programs else ""
    return f"{special}{tile.rows}x{tile.keys_a_step}w{tile.warps}s{tile.stages}{split}"


def decode_candidates(windowed: bool) -> list[AttentionTile]:
    shapes = [(64, 4, 2), (64, 4, 3), (32, 4, 3), (64, 8, 2), (128, 4, 1), (128, 8, 1)]
    ahead = [(64, 4, 2), (64, 4, 3), (32, 4, 4), (64, 8, 2), (128, 8, 1)]
    splits = (0, 256) if windowed else (528, 256)
    tiles = [AttentionTile(16, *shape, *splits) for shape in shapes]
    tiles += [AttentionTile(16, *shape, *splits, ids_ahead=True) for shape in ahead]
    if windowed:
        return tiles
    finer = [(264, 64), (1056, 128)]
    return [*tiles, *(AttentionTile(16, 64, 4, 3, *split, ids_ahead=True) for split in finer)]


def prefill_candidates(windowed: bool) -> list[AttentionTile]:
    if windowed:
        shapes = [
            (128, 64, 8, 2), (128, 64, 8, 1), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 1),
            (256, 32, 8, 2),
        ]  # fmt: skip
    else:
        shapes = [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)]
    tiles = [AttentionTile(*shape) for shape in shapes]
    special = [(128, 64, 4, 2), (128, 128, 4, 2)] if windowed else [(128, 128, 4, 2), (128, 64, 4, 3)]
    return [AttentionTile(*shape, specialised=True) for shape in special] + tiles


def candidates(phase: Phase, windowed: bool) -> list[AttentionTile]:
    return decode_candidates(windowed) if phase == "decode" else prefill_candidates(windowed)


@dataclass
class Case:
    """Inputs of ``paged_attention`` for sequences of (queries, keys), several of them on disjoint pages."""

    windowed: bool
    lengths: list[tuple[int, int]]
    copies: int = 1
    padding: int = 0
    arguments: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kv_heads = 8 if self.windowed else 4
        counts = [-(-keys // PAGE) for _, keys in self.lengths]
        pages = sum(counts)
        k_cache = torch.empty(pages * self.copies, PAGE, kv_heads, WIDTH, dtype=BF16, device="cuda").normal_()
        v_cache = torch.empty(pages * self.copies, PAGE, kv_heads, VALUE_WIDTH, dtype=BF16, device="cuda")
        v_cache.normal_()
        order = torch.randperm(pages * self.copies).int()
        queries = torch.tensor([0, *(queries for queries, _ in self.lengths)])
        sinks = torch.randn(HEADS, device="cuda") if self.windowed else None
        for copy in range(self.copies):
            table = torch.full((len(counts), MAX_KEYS // PAGE), -1, dtype=torch.int32)
            for row, part in enumerate(order[copy * pages : (copy + 1) * pages].split(counts)):
                table[row, : len(part)] = part
            tokens = int(queries.sum()) + self.padding
            self.arguments.append({
                "q": torch.randn(tokens, HEADS, WIDTH, device="cuda").to(BF16),
                "k_cache": k_cache, "v_cache": v_cache, "page_table": table.cuda(),
                "query_start": queries.cumsum(0).int().cuda(),
                "kv_len": torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32).cuda(),
                "scale": WIDTH**-0.5, "window": WINDOW if self.windowed else None, "sinks": sinks,
            })  # fmt: skip

    @property
    def nbytes(self) -> float:
        """Bytes of keys and values that decode must read."""
        keys = sum(min(keys, WINDOW) if self.windowed else keys for _, keys in self.lengths)
        return keys * (8 if self.windowed else 4) * (WIDTH + VALUE_WIDTH) * 2.0

    @property
    def flop(self) -> float:
        pairs = 0
        for queries, keys in self.lengths:
            seen = torch.arange(keys - queries + 1, keys + 1)
            pairs += int((seen.clamp_max(WINDOW) if self.windowed else seen).sum())
        return 2.0 * HEADS * pairs * (WIDTH + VALUE_WIDTH)

    def time(self, call: Callable[..., torch.Tensor], **extra: Any) -> float:
        """Median seconds of one call."""
        calls = [lambda given=given: call(**given, **extra) for given in self.arguments]
        return time_graph(calls, replays=5).median


def check(phase: Phase, windowed: bool, tile: AttentionTile) -> float:
    """Largest relative error of a candidate against float64; runs, and so compiles, what will be timed."""
    torch.manual_seed(1)
    if phase == "decode":
        lengths = [(1, 150), (1, 1), (0, 5), (1, 700), (1, 64), (1, 129)]
    else:
        lengths = [(200, 200), (1, 300), (77, 500), (0, 5), (3, 64), (260, 900)]
    case = Case(windowed, lengths, padding=1)
    [given] = case.arguments
    wide = {name: given[name].double() for name in ("q", "k_cache", "v_cache")}
    want = TorchKernels().paged_attention(**given | wide)
    variants = [tile]
    if phase == "decode":
        variants = [replace(tile, programs=programs, split_keys=32) for programs in (0, 10**6)]
    worst = 0.0
    for variant in variants:
        got = attention.paged_attention(**given, tile=variant).double()
        if not torch.equal(got[-1], torch.zeros_like(got[-1])):
            raise ValueError("padding rows are not zero")
        worst = max(worst, float((got - want).norm() / want.norm()))
    if not worst < BOUND:
        raise ValueError(f"relative error {worst:.1e}")
    return worst


Job = tuple[Phase, bool, AttentionTile]


def run_checks(jobs: list[Job], processes: int, per_process: int | None, deadline: float) -> dict[Job, str]:
    """What went wrong, by job."""
    wrong = {}
    with get_context("spawn").Pool(processes, maxtasksperchild=per_process) as pool:
        for job, result in [(job, pool.apply_async(check, job)) for job in jobs]:
            try:
                result.get(max(0.1, deadline - time.monotonic()))
            except Exception as problem:
                wrong[job] = f"{type(problem).__name__} {str(problem)[-300:]}"
        pool.terminate()
    return wrong


def precheck(jobs: list[Job], processes: int, deadline: float) -> set[Job]:
    """Jobs that compile and compute the right numbers. An illegal access ends a process's context, so those
    that fail otherwise than by their numbers are tried again in a process of their own."""
    wrong = run_checks(jobs, processes, None, deadline)
    again = [job for job, problem in wrong.items() if not problem.startswith(("ValueError", "TimeoutError"))]
    if again:
        repeated = run_checks(again, min(processes, len(again)), 1, deadline + 5)
        wrong = {job: problem for job, problem in wrong.items() if job not in again} | repeated
    for (phase, windowed, tile), problem in wrong.items():
        kind = f"{phase} {'window' if windowed else 'full'} {tile_name(tile)}"
        print(f"SKIPPED {kind}: {problem}", flush=True)
    return set(jobs) - set(wrong)


def decode_case(windowed: bool, batch: int, context: int) -> Case:
    spread = torch.Generator().manual_seed(batch)
    keys = [context] * batch
    if context < 512:
        keys = torch.randint(128, 201, (batch,), generator=spread).tolist()
    copies = max(1, min(12, int(3e8 / (batch * context * 5120))))
    return Case(windowed, [(1, each) for each in keys], copies=copies)


PLANS: list[tuple[Phase, bool, tuple[tuple[int, int], ...]]] = [
    ("decode", False, ((256, 150), (256, 1024))),
    ("decode", True, ((256, 150),)),
    ("decode", False, ((512, 150), (512, 1024))),
    ("decode", True, ((512, 150),)),
    ("prefill", False, ((1, 8192),)),
    ("prefill", True, ((1, 8192),)),
    ("decode", False, ((1, 150), (1, 1024), (1, 8192))),
    ("decode", True, ((1, 150),)),
    ("prefill", False, ((8, 2048),)),
    ("prefill", True, ((8, 2048),)),
    ("decode", False, ((32, 150), (32, 1024), (32, 8192))),
    ("decode", True, ((32, 150),)),
    ("decode", False, ((128, 150), (128, 1024), (128, 8192))),
    ("decode", True, ((128, 150),)),
    ("prefill", False, ((32, 1024),)),
    ("prefill", True, ((32, 1024),)),
    ("decode", False, ((64, 150), (64, 8192))),
    ("decode", True, ((64, 150),)),
    ("decode", False, ((8, 150), (8, 1024), (8, 8192))),
    ("decode", True, ((8, 150),)),
    ("decode", False, ((256, 8192),)),
]
"""What is tuned together, most important first: (sequences, keys) of one table entry."""


def tune_one(
    phase: Phase,
    windowed: bool,
    sizes: tuple[tuple[int, int], ...],
    tiles: list[AttentionTile],
    read: float,
    chosen: set[AttentionTile],
) -> dict[str, Any]:
    """Times of every candidate; the best has the least sum of log times, short contexts counting twice."""
    scores = dict.fromkeys(tiles, 0.0)
    rows = []
    for sequences, keys in sizes:
        one = decode_case(windowed, sequences, keys)
        if phase == "prefill":
            one = Case(windowed, [(keys, keys)] * sequences)
        old = one.time(attention_before.paged_attention)
        times = {tile: one.time(attention.paged_attention, tile=tile) for tile in tiles}
        for tile, spent in times.items():
            scores[tile] += math.log(spent) * (2 if keys < 512 and len(sizes) > 1 else 1)
        rows.append((sequences, keys, one.nbytes, one.flop, old, times))
        del one
    weight = sum(2 if keys < 512 and len(sizes) > 1 else 1 for _, keys in sizes)
    least = min(scores.values())
    near = [tile for tile in tiles if scores[tile] <= least + SLACK * weight]
    best = min(near, key=lambda tile: (tile not in chosen, scores[tile]))
    kind = f"{phase} {'window' if windowed else 'full'}"
    for sequences, keys, nbytes, flop, old, times in rows:
        unit, work = ("TB/s", nbytes) if phase == "decode" else ("TFLOP/s", flop)
        before, after = (work / spent / 1e12 for spent in (old, times[best]))
        share = f"{nbytes / times[best] / read:4.0%}" if phase == "decode" else ""
        print(f"{kind:14s} {sequences:3d} x {keys:4d}: old {old * 1e6:7.1f} us {before:6.2f}, "
              f"new {times[best] * 1e6:7.1f} us {after:6.2f} {unit} {share} {tile_name(best)}")  # fmt: skip
        print(
            "   " + " ".join(f"{tile_name(tile)}={spent * 1e6:.1f}" for tile, spent in times.items()),
            flush=True,
        )
    sequences, keys = sizes[0]
    load = sequences * (8 if windowed else 4) if phase == "decode" else sequences * keys
    return {
        "phase": phase, "windowed": windowed, "load": load, "best": asdict(best),
        "rows": [
            {"sequences": sequences, "keys": keys, "old_us": old * 1e6, "bytes": nbytes, "flop": flop,
             "us": {tile_name(tile): spent * 1e6 for tile, spent in times.items()}}
            for sequences, keys, nbytes, flop, old, times in rows
        ],
    }  # fmt: skip


def time_rope(tokens: int, kv_heads: int, copy: float) -> None:
    """Bytes: rotated channels of q, keys and values, each read and written."""
    fused = torch.randn(tokens, HEADS * WIDTH + kv_heads * 320, device="cuda").to(BF16)
    q, k, v = fused.split([HEADS * WIDTH, kv_heads * WIDTH, kv_heads * VALUE_WIDTH], dim=1)
    pages = -(-tokens // PAGE)
    caches = [torch.zeros(pages, PAGE, kv_heads, w, dtype=BF16, device="cuda") for w in (WIDTH, VALUE_WIDTH)]
    given = {
        "positions": torch.arange(tokens, device="cuda"), "cos_sin": torch.randn(9216, 64, device="cuda"),
        "k_cache": caches[0], "v_cache": caches[1], "slots": torch.arange(tokens, device="cuda"),
        "value_scale": 0.7,
    }  # fmt: skip
    heads = [part.unflatten(1, (-1, w)) for part, w in ((q, WIDTH), (k, WIDTH), (v, VALUE_WIDTH))]
    spent = time_graph([lambda: rope.rope_and_store(*heads, **given)] * 4, replays=5).median
    nbytes = tokens * 2 * 2 * (HEADS * 64 + kv_heads * 320)
    print(f"rope_and_store {tokens:5d} tokens, {kv_heads} kv heads: {spent * 1e6:.1f} us, "
          f"{nbytes / spent / 1e12:.2f} TB/s, {nbytes / spent / copy:.0%} of a copy", flush=True)  # fmt: skip


def attempt(what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as problem:
        print(f"FAILED {what}: {type(problem).__name__} {str(problem)[-400:]}", flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the two JSON files")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which no new size is begun")
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    begun = time.monotonic()
    jobs = [
        (phase, windowed, tile)
        for phase in ("prefill", "decode")
        for windowed in (False, True)
        for tile in candidates(phase, windowed)  # type: ignore[arg-type]
    ]
    sound = precheck(jobs, options.processes, begun + 0.6 * options.limit)
    print(f"{len(sound)} of {len(jobs)} candidates are sound, {time.monotonic() - begun:.0f} s", flush=True)
    rates = bandwidth(2 << 30)
    print(f"read {rates['read'] / 1e12:.2f} TB/s, copy {rates['copy'] / 1e12:.2f} TB/s")
    results: list[dict[str, Any]] = []
    chosen: dict[tuple[Phase, bool], set[AttentionTile]] = {}
    for tokens, kv_heads in ((8192, 8), (8192, 4), (512, 8), (1, 8)):
        attempt("rope", lambda tokens=tokens, kv=kv_heads: time_rope(tokens, kv, rates["copy"]))
    for phase, windowed, sizes in PLANS:
        if time.monotonic() - begun > options.limit - 3:
            print(f"out of time: {phase} {windowed} {sizes} not tuned")
            continue
        tiles = [tile for tile in candidates(phase, windowed) if (phase, windowed, tile) in sound]
        taken = chosen.setdefault((phase, windowed), set())
        given = (phase, windowed, sizes, tiles, rates["read"], taken)
        result = attempt(f"{phase} {sizes}", lambda given=given: tune_one(*given))
        if result is not None:
            results.append(result)
            taken.add(AttentionTile(**result["best"]))
        torch.cuda.empty_cache()
    tables: dict[tuple[Phase, bool], dict[int, AttentionTile]] = {}
    for result in reversed(results):
        kind = (result["phase"], result["windowed"])
        tables.setdefault(kind, {})[result["load"]] = AttentionTile(**result["best"])
    table = {"attention": [entry(*kind, by_load) for kind, by_load in sorted(tables.items())]}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, document in (
        ("tuned_attention_h200", table),
        ("attention_tuning", {"rates": rates, "sizes": results}),
    ):
        (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"done in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
