"""Metrics that are read from the engine when scraped: schedulers, page pools, ranks and their experts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from interlock.engine.client_protocol import EngineClient
from interlock.engine.load_history import RankWindow
from interlock.engine.messages import RankLoad, SchedulerStats
from interlock.server.load_view import balancedness, expert_imbalance, rank_rows
from interlock.server.transfer_metrics import TRANSFER_METRIC_NAMES, transfer_metrics

_log = logging.getLogger("interlock.server")

Stat = tuple[str, Callable[[SchedulerStats], float]]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


_GAUGES: Final[Mapping[str, Stat]] = MappingProxyType(
    {
        "interlock:num_requests_running": ("Requests in the running batch.", lambda s: s.running),
        "interlock:num_requests_waiting": ("Requests waiting for admission.", lambda s: s.waiting),
        "interlock:kv_cache_usage_perc": (
            "Share of full-attention KV pages that running requests own, 0 to 1.",
            lambda s: _share(s.full_pages - s.full_pages_free - s.full_pages_cached, s.full_pages),
        ),
        "interlock:kv_window_cache_usage_perc": (
            "Share of sliding-window KV pages that running requests own, 0 to 1.",
            lambda s: _share(s.window_pages - s.window_pages_free - s.window_pages_cached, s.window_pages),
        ),
    }
)
_PAGES: Final[Mapping[str, tuple[str, Callable[[SchedulerStats], tuple[float, float]]]]] = MappingProxyType(
    {
        "interlock:kv_pages": ("KV pages in all.", lambda s: (s.full_pages, s.window_pages)),
        "interlock:kv_pages_free": (
            "KV pages that hold nothing.",
            lambda s: (s.full_pages_free, s.window_pages_free),
        ),
        "interlock:kv_pages_cached": (
            "KV pages that only the prefix cache holds; they can be evicted.",
            lambda s: (s.full_pages_cached, s.window_pages_cached),
        ),
    }
)
_COUNTERS: Final[Mapping[str, Stat]] = MappingProxyType(
    {
        "interlock:prompt_tokens": ("Prompt tokens admitted.", lambda s: s.prompt_tokens_total),
        "interlock:generation_tokens": ("Tokens generated.", lambda s: s.generated_tokens_total),
        "interlock:prefix_cache_queries": (
            "Prompt tokens looked up in the prefix tree.",
            lambda s: s.prefix_queries_total,
        ),
        "interlock:prefix_cache_hits": (
            "Prompt tokens found in the prefix tree.",
            lambda s: s.prefix_hits_total,
        ),
        "interlock:num_preemptions": ("Retractions of running requests.", lambda s: s.retractions_total),
        "interlock:num_aborts": ("Aborts seen by the scheduler.", lambda s: s.aborts_total),
        "interlock:prefill_steps": ("Prefill steps.", lambda s: s.steps_prefill_total),
        "interlock:decode_steps": ("Decode steps.", lambda s: s.steps_decode_total),
    }
)

ENGINE_METRIC_NAMES: Final = frozenset(
    {
        *_GAUGES,
        *_PAGES,
        *_COUNTERS,
        *TRANSFER_METRIC_NAMES,
        "interlock:engine_healthy",
        "interlock:plan_info",
        "interlock:cache_config_info",
        "interlock:generation_throughput",
        "interlock:prefix_cache_hit_rate",
        "interlock:graph_replays",
        "interlock:graph_misses",
        "interlock:moe_steps_counted",
        "interlock:moe_tokens_dispatched",
        "interlock:moe_rows_received",
        "interlock:moe_dispatch_seconds",
        "interlock:moe_combine_seconds",
        "interlock:moe_capacity_use",
        "interlock:expert_load_imbalance",
        "interlock:rank_balancedness",
    }
)


class EngineCollector(Collector):
    """Asks the engine at every scrape. What the engine cannot say is left out, and logged."""

    def __init__(self, engine: EngineClient, model_name: str, digest: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._digest = digest

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._engine.stats()
            healthy = self._engine.health() is None
        except Exception:
            _log.exception("metrics: the engine's counters are not available")
            stats, healthy = (), False
        yield from self._schedulers(stats)
        yield from transfer_metrics(self._model_name, stats)
        yield self._gauge("interlock:engine_healthy", "1 while the engine is healthy.", float(healthy))
        yield self._gauge(
            "interlock:plan_info", "Always 1; labels name the launch plan.", 1.0, digest=self._digest
        )
        plan = self._engine.plan
        pages = {"block_size": plan.page_size, "num_gpu_blocks": plan.full_pages or plan.window_pages}
        text = "Always 1; labels say how large the KV pool of a replica is."
        yield self._gauge("interlock:cache_config_info", text, 1.0, **pages)
        rates, minute = self._engine.history.rates(), self._engine.history.rates(60)
        yield self._gauge(
            "interlock:generation_throughput", "Tokens generated a second, last 10 s.", rates.generated_tokens
        )
        yield self._gauge(
            "interlock:prefix_cache_hit_rate",
            "Share of prompt tokens found in the prefix tree, last minute.",
            minute.prefix_hit_rate,
        )
        yield from self._ranks(self._engine.history.latest())
        yield from self._last_minute(self._engine.history.window())

    def _gauge(self, name: str, text: str, value: float, **labels: object) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        family.add_metric([self._model_name, *map(str, labels.values())], value)
        return family

    def _schedulers(self, stats: Sequence[SchedulerStats]) -> Iterator[Metric]:
        labels = ["model_name", "replica"]
        families: list[tuple[Any, Callable[[SchedulerStats], float]]] = [
            *((GaugeMetricFamily(name, text, labels=labels), get) for name, (text, get) in _GAUGES.items()),
            *(
                (CounterMetricFamily(name, text, labels=labels), get)
                for name, (text, get) in _COUNTERS.items()
            ),
        ]
        for family, get in families:
            for scheduler in stats:
                family.add_metric([self._model_name, str(scheduler.replica)], get(scheduler))
            yield family
        for name, (text, get_pair) in _PAGES.items():
            pages = GaugeMetricFamily(name, text, labels=[*labels, "space"])
            for scheduler in stats:
                for space, count in zip(("full", "window"), get_pair(scheduler), strict=True):
                    pages.add_metric([self._model_name, str(scheduler.replica), space], count)
            yield pages

    def _ranks(self, loads: Sequence[RankLoad]) -> Iterator[Metric]:
        """Running sums of the ranks, most of them by phase."""
        own = ["model_name", "rank"]
        replays = CounterMetricFamily(
            "interlock:graph_replays", "Decode steps run as a CUDA graph.", labels=own
        )
        misses = CounterMetricFamily(
            "interlock:graph_misses",
            "Decode steps that no captured CUDA graph was large enough for.",
            labels=own,
        )
        by_phase = [*own, "phase"]
        steps = CounterMetricFamily(
            "interlock:moe_steps_counted", "Steps whose expert load was counted.", labels=by_phase
        )
        tokens = CounterMetricFamily(
            "interlock:moe_tokens_dispatched",
            "Tokens that the rank dispatched in counted steps.",
            labels=by_phase,
        )
        rows = CounterMetricFamily(
            "interlock:moe_rows_received",
            "Rows that the rank's experts received in counted steps, all layers.",
            labels=by_phase,
        )
        dispatch = SummaryMetricFamily(
            "interlock:moe_dispatch_seconds",
            "Time of one layer's dispatch, in sampled steps.",
            labels=by_phase,
        )
        combine = SummaryMetricFamily(
            "interlock:moe_combine_seconds", "Time of one layer's combine, in sampled steps.", labels=by_phase
        )
        for load in loads:
            labels = [self._model_name, str(load.rank)]
            replays.add_metric(labels, load.graph_replays)
            misses.add_metric(labels, load.graph_misses)
            for name, phase in (("prefill", load.prefill), ("decode", load.decode)):
                steps.add_metric([*labels, name], phase.steps)
                tokens.add_metric([*labels, name], phase.tokens)
                rows.add_metric([*labels, name], int(np.frombuffer(phase.rows, dtype="<i8").sum()))
                dispatch.add_metric([*labels, name], phase.dispatch_calls, phase.dispatch_seconds)
                combine.add_metric([*labels, name], phase.combine_calls, phase.combine_seconds)
        yield from (replays, misses, steps, tokens, rows, dispatch, combine)

    def _last_minute(self, windows: Sequence[RankWindow]) -> Iterator[Metric]:
        use = GaugeMetricFamily(
            "interlock:moe_capacity_use",
            "Mean share of the capacity T that a rank dispatched in a step, last minute.",
            labels=["model_name", "rank", "phase"],
        )
        for window in windows:
            for name, phase in (("prefill", window.prefill), ("decode", window.decode)):
                use.add_metric([self._model_name, str(window.latest.rank), name], phase.capacity_use)
        yield use
        imbalance = GaugeMetricFamily(
            "interlock:expert_load_imbalance",
            "Rows of a layer's busiest expert over the mean of its experts, last minute; 0 without load.",
            labels=["model_name", "layer"],
        )
        for layer, value in expert_imbalance(windows).items():
            imbalance.add_metric([self._model_name, str(layer)], value)
        yield imbalance
        yield self._gauge(
            "interlock:rank_balancedness",
            "Mean over layers of mean rank's rows / busiest rank's rows, last minute; 1 is even, 0 no load.",
            balancedness(rank_rows(windows)),
        )
