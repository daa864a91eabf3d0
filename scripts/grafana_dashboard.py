"""Writes ``packaging/grafana/interlock.json``: ``python scripts/grafana_dashboard.py``.

A test holds the file equal to what this makes, and every metric in it to those that ``/metrics`` exposes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "packaging" / "grafana" / "interlock.json"
WIDTH = 24
SELECT = 'model_name="$model_name"'
Query = tuple[str, str]
"""(PromQL expression, legend)."""


@dataclass(frozen=True)
class Panel:
    """One panel; ``kind`` is Grafana's type of it."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    highest: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]
    height: int = 8


def gauge(name: str, by: str = "") -> str:
    return f"sum{_by(by)} (interlock:{name}{{{SELECT}}})"


def rate(name: str, by: str = "", more: str = "") -> str:
    return f"sum{_by(by)} (rate(interlock:{name}{{{SELECT}{more}}}[$__rate_interval]))"


def quantiles(name: str) -> list[Query]:
    found = []
    for share in (0.5, 0.95, 0.99):
        buckets = rate(f"{name}_bucket", "le")
        found.append((f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f}"))
    return found


def mean(name: str, by: str) -> str:
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


ROWS = (
    Row(
        "Now",
        (
            Panel("Healthy", [(gauge("engine_healthy"), "")], kind="stat", width=3),
            Panel("Running", [(gauge("num_requests_running"), "")], kind="stat", width=3),
            Panel("Waiting", [(gauge("num_requests_waiting"), "")], kind="stat", width=3),
            Panel("Tokens/s", [(gauge("generation_throughput"), "")], kind="stat", width=4),
            Panel(
                "KV pages in use",
                [(f"max(interlock:kv_cache_usage_perc{{{SELECT}}})", "")],
                "percentunit",
                "gauge",
                4,
                highest=1,
            ),
            Panel(
                "Prefix hits", [(gauge("prefix_cache_hit_rate"), "")], "percentunit", "gauge", 4, highest=1
            ),
            Panel("Rank balance", [(gauge("rank_balancedness"), "")], "percentunit", "gauge", 3, highest=1),
        ),
        height=5,
    ),
    Row(
        "Latency",
        (
            Panel("Time to first token", quantiles("time_to_first_token_seconds"), "s"),
            Panel("Between tokens", quantiles("inter_token_latency_seconds"), "s"),
            Panel("Whole request", quantiles("e2e_request_latency_seconds"), "s"),
            Panel("In the queue", quantiles("request_queue_time_seconds"), "s"),
            Panel("Prefill", quantiles("request_prefill_time_seconds"), "s"),
            Panel("Decode", quantiles("request_decode_time_seconds"), "s"),
        ),
    ),
    Row(
        "Requests",
        (
            Panel(
                "Tokens per second",
                [(rate("prompt_tokens_total"), "prompt"), (rate("generation_tokens_total"), "generated")],
            ),
            Panel(
                "Choices per second, by end",
                [
                    (rate("request_success_total", "finished_reason"), "{{finished_reason}}"),
                    (rate("requests_aborted_total"), "aborted"),
                    (rate("requests_failed_total"), "failed"),
                ],
                stacked=True,
            ),
            Panel(
                "Refused per second, by status", [(rate("requests_rejected_total", "status"), "{{status}}")]
            ),
            Panel(
                "Running and waiting",
                [
                    (gauge("num_requests_running", "replica"), "running, replica {{replica}}"),
                    (gauge("num_requests_waiting", "replica"), "waiting, replica {{replica}}"),
                ],
            ),
            Panel(
                "Steps per second",
                [(rate("prefill_steps_total"), "prefill"), (rate("decode_steps_total"), "decode")],
            ),
            Panel(
                "Retractions per second", [(rate("num_preemptions_total", "replica"), "replica {{replica}}")]
            ),
        ),
    ),
    Row(
        "KV cache",
        (
            Panel(
                "Pages",
                [
                    (
                        f"{gauge('kv_pages', 'space')} - {gauge('kv_pages_free', 'space')} - "
                        f"{gauge('kv_pages_cached', 'space')}",
                        "{{space}}, in use",
                    ),
                    (gauge("kv_pages_cached", "space"), "{{space}}, cached"),
                    (gauge("kv_pages_free", "space"), "{{space}}, free"),
                ],
                width=12,
                stacked=True,
            ),
            Panel(
                "Prompt tokens found in the prefix tree",
                [(f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "hits")],
                "percentunit",
                width=12,
                highest=1,
            ),
        ),
    ),
    Row(
        "Expert parallelism",
        (
            Panel(
                "Dispatch of one layer, mean",
                [(mean("moe_dispatch_seconds", "rank, phase"), "rank {{rank}}, {{phase}}")],
                "s",
                text="Sampled steps. Waiting for slower ranks is part of it.",
            ),
            Panel(
                "Combine of one layer, mean",
                [(mean("moe_combine_seconds", "rank, phase"), "rank {{rank}}, {{phase}}")],
                "s",
                text="Sampled steps. Waiting for slower ranks is part of it.",
            ),
            Panel(
                "Capacity use",
                [(gauge("moe_capacity_use", "rank, phase"), "rank {{rank}}, {{phase}}")],
                "percentunit",
                text="Mean share of T, the tokens that a rank may dispatch in one step.",
            ),
            Panel(
                "Rows received per second",
                [(rate("moe_rows_received_total", "rank"), "rank {{rank}}")],
                text="Counted steps only: a share of the true number that is the same on every rank.",
            ),
            Panel(
                "Busiest expert over the mean, by layer",
                [(gauge("expert_load_imbalance", "layer"), "layer {{layer}}")],
            ),
            Panel("Mean rank over the busiest", [(gauge("rank_balancedness"), "balance")], highest=1),
            Panel(
                "CUDA graphs",
                [
                    (rate("graph_replays_total", "rank"), "replays, rank {{rank}}"),
                    (rate("graph_misses_total", "rank"), "misses, rank {{rank}}"),
                ],
                width=24,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "Interlock",
        "uid": "interlock",
        "tags": ["interlock", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _model()]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": _source(),
        "query": "label_values(interlock:engine_healthy, model_name)",
        "refresh": 2,
        "sort": 1,
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in ROWS:
        yield _row(number, row.title, y)
        number, y, x = number + 1, y + 1, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + row.height
            yield _panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": row.height})
            number, x = number + 1, x + panel.width
        y += row.height


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
        if panel.stacked:
            defaults["custom"]["stacking"] = {"mode": "normal"}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": _source(), "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _source(),
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
