"""The load of the last minute as the page and the metrics show it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from interlock.engine.client_protocol import EngineClient
from interlock.engine.load_history import WINDOW_SECONDS, Counts, PhaseWindow, RankWindow
from interlock.engine.messages import TransferStats


def expert_rows(windows: Sequence[RankWindow]) -> tuple[tuple[int, ...], Counts]:
    """(decoder layers, rows int64 [layers, experts]) over all ranks, each expert counted once."""
    if not windows:
        return (), np.zeros((0, 0), dtype=np.int64)
    layers = windows[0].latest.layers
    experts = max(window.latest.first_expert + window.latest.experts for window in windows)
    rows = np.zeros((len(layers), experts), dtype=np.int64)
    for window in windows:
        first = window.latest.first_expert
        if not window.latest.is_slice:
            rows[:, first : first + window.latest.experts] += window.rows
    return layers, rows


def rank_rows(windows: Sequence[RankWindow]) -> Counts:
    """Rows int64 [ranks, layers] that each rank's experts received."""
    if not windows:
        return np.zeros((0, 0), dtype=np.int64)
    return np.stack([window.rows.sum(axis=1) for window in windows])


def expert_imbalance(windows: Sequence[RankWindow]) -> dict[int, float]:
    """Decoder layer -> rows of its busiest expert over the mean; 0 without load."""
    layers, rows = expert_rows(windows)
    return {layer: _over_mean(own) for layer, own in zip(layers, rows, strict=True)}


def balancedness(rows: Counts) -> float:
    """Mean over layers of (mean rank's rows / busiest rank's rows); 1 is even, 0 without load.

    Args:
        rows: int64 [ranks, layers].
    """
    if not rows.size:
        return 0.0
    busiest = rows.max(axis=0)
    loaded = busiest > 0
    return float((rows.mean(axis=0)[loaded] / busiest[loaded]).mean()) if loaded.any() else 0.0


def load_json(engine: EngineClient, live: int) -> dict[str, Any]:
    """What ``/load`` answers; ``server_load`` is vLLM's field of the same name."""
    stats, history = engine.stats(), engine.history
    now, ten, minute = time.monotonic(), history.rates(), history.rates(60)
    points = history.points()
    series = [
        {
            "ago": round(now - point.at, 1),
            "running": point.running,
            "waiting": point.waiting,
            "kv_usage": round(point.kv_usage, 4),
            "generated_tokens": point.generated_tokens,
            "prompt_tokens": point.prompt_tokens,
        }
        for point in points
    ]
    return {
        "server_load": live,
        "role": engine.plan.disaggregation_mode,
        "running": sum(s.running for s in stats),
        "waiting": sum(s.waiting for s in stats),
        "kv_usage": round(points[-1].kv_usage, 4) if points else 0.0,
        "max_running_requests": engine.plan.max_running_requests * engine.plan.attn_dp_size,
        "generated_tokens_per_second": round(ten.generated_tokens, 2),
        "prompt_tokens_per_second": round(ten.prompt_tokens, 2),
        "prefix_hit_rate": round(minute.prefix_hit_rate, 4),
        "preemptions": sum(s.retractions_total for s in stats),
        "replicas": [
            {
                "replica": s.replica,
                "running": s.running,
                "waiting": s.waiting,
                "pages": {
                    "full": _pages(s.full_pages, s.full_pages_free, s.full_pages_cached),
                    "window": _pages(s.window_pages, s.window_pages_free, s.window_pages_cached),
                },
                "transfer": None if s.transfer is None else _transfer(s.transfer),
            }
            for s in stats
        ],
        "series": series,
    }


def _transfer(transfer: TransferStats) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.structs.asdict(transfer)
    return shown | {
        name: round(getattr(transfer, name), 6) for name in ("seconds_total", "exposed_seconds_total")
    }


def experts_json(engine: EngineClient) -> dict[str, Any]:
    """What ``/experts`` answers: rows of counted steps in the last minute, by layer, expert, rank."""
    windows = engine.history.window()
    layers, rows = expert_rows(windows)
    return {
        "window_seconds": WINDOW_SECONDS,
        "sample_every": windows[0].latest.sample_every if windows else 0,
        "layers": list(layers),
        "experts": int(rows.shape[1]),
        "rows": rows.tolist(),
        "imbalance": [round(_over_mean(own), 4) for own in rows],
        "balancedness": round(balancedness(rank_rows(windows)), 4),
        "ranks": [_rank(window) for window in windows],
    }


def _rank(window: RankWindow) -> dict[str, Any]:
    latest = window.latest
    return {
        "rank": latest.rank,
        "first_expert": latest.first_expert,
        "experts": latest.experts,
        "is_slice": latest.is_slice,
        "rows": window.rows.sum(axis=1).tolist(),
        "graph_replays": latest.graph_replays,
        "graph_misses": latest.graph_misses,
        "prefill": _phase(window.prefill),
        "decode": _phase(window.decode),
    }


def _phase(window: PhaseWindow) -> dict[str, Any]:
    return {
        "steps": window.steps,
        "tokens": window.tokens,
        "capacity": window.capacity,
        "capacity_use": round(window.capacity_use, 4),
        "dispatch_ms": _milliseconds(window.dispatch_seconds),
        "combine_ms": _milliseconds(window.combine_seconds),
        "rows": int(window.rows.sum()),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)


def _pages(total: int, free: int, cached: int) -> dict[str, int]:
    return {"total": total, "free": free, "cached": cached, "used": total - free - cached}


def _over_mean(rows: Counts) -> float:
    mean = float(rows.mean()) if rows.size else 0.0
    return float(rows.max()) / mean if mean else 0.0
