"""Metrics of a prefill or decode server in transfers; a server of both phases has them without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from interlock.engine.messages import SchedulerStats, TransferStats

Stat = tuple[str, Callable[[TransferStats], float]]
_STATES: Final = "interlock:pd_requests"
_GAUGES: Final[Mapping[str, Stat]] = MappingProxyType(
    {
        "interlock:pd_peers": ("Servers of the other role that are connected.", lambda t: t.peers),
        "interlock:pd_pages_held": (
            "KV pages of both spaces that a transfer may read or write.",
            lambda t: t.pages_held,
        ),
        "interlock:pd_pages_quarantined": (
            "Of those, pages of requests that are over for their clients.",
            lambda t: t.pages_quarantined,
        ),
        "interlock:kv_transfer_pending": ("Copies ordered and not finished.", lambda t: t.copies_pending),
    }
)
_COUNTERS: Final[Mapping[str, Stat]] = MappingProxyType(
    {
        "interlock:pd_handed_over": ("Requests handed over.", lambda t: t.handed_over_total),
        "interlock:pd_failed": ("Requests that failed before they were.", lambda t: t.failed_total),
        "interlock:pd_tokens": ("Prompt tokens that moved, cached ones not.", lambda t: t.tokens_total),
        "interlock:kv_transfer_copies": ("Copies, one for each rank and chunk.", lambda t: t.copies_total),
        "interlock:kv_transfer_bytes": ("Bytes written to decode servers.", lambda t: t.bytes_total),
        "interlock:kv_transfer_seconds": ("Seconds spent writing them.", lambda t: t.seconds_total),
        "interlock:kv_transfer_exposed_seconds": (
            "Seconds for which computed prompts waited for their last pages.",
            lambda t: t.exposed_seconds_total,
        ),
        "interlock:kv_transfer_failures": ("Copies that failed.", lambda t: t.copy_failures_total),
    }
)
TRANSFER_METRIC_NAMES: Final = frozenset({_STATES, *_GAUGES, *_COUNTERS})


def transfer_metrics(model_name: str, stats: Sequence[SchedulerStats]) -> Iterator[Metric]:
    """By replica and role."""
    labels = ["model_name", "replica", "role"]
    found = [(s, s.transfer) for s in stats if s.transfer is not None]
    states = GaugeMetricFamily(
        _STATES, "Requests that are not handed over yet, by state.", labels=[*labels, "state"]
    )
    for scheduler, transfer in found:
        for state, count in transfer.states.items():
            states.add_metric([model_name, str(scheduler.replica), transfer.role, state], count)
    yield states
    for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (text, get) in table.items():
            family = kind(name, text, labels=labels)
            for scheduler, transfer in found:
                family.add_metric([model_name, str(scheduler.replica), transfer.role], get(transfer))
            yield family
