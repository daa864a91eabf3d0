"""What a prefill or decode server tells of its transfers: metrics, /load and the page's table."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from interlock.engine.messages import SchedulerStats, TransferStats
from interlock.server.transfer_metrics import TRANSFER_METRIC_NAMES, transfer_metrics
from tests.server.fake_engine import FakeEngine

STATS = TransferStats(
    role="prefill",
    states={"computing": 2, "sending": 1},
    peers=2,
    pages_held=40,
    pages_quarantined=7,
    copies_pending=3,
    tokens_total=900,
    handed_over_total=11,
    failed_total=4,
    copies_total=25,
    bytes_total=1 << 33,
    seconds_total=1.25,
    exposed_seconds_total=0.25,
    copy_failures_total=2,
)


class _Fixed:
    def __init__(self, stats: list[SchedulerStats]) -> None:
        self._stats = stats

    def collect(self) -> Any:
        return transfer_metrics("m", self._stats)


def exposed(stats: list[SchedulerStats]) -> dict[tuple[str, str, str], float]:
    """(sample name, replica, state or role) -> value."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(stats))  # type: ignore[arg-type]
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.name for family in families} == TRANSFER_METRIC_NAMES
    return {
        (
            sample.name,
            sample.labels["replica"],
            sample.labels.get("state", sample.labels["role"]),
        ): sample.value
        for family in families
        for sample in family.samples
    }


@given(st.lists(st.none() | st.integers(0, 1 << 50), max_size=4))
def test_each_count_of_each_replica_is_exposed_once(counts: list[int | None]) -> None:
    """Replicas of one server are all of one role; here every second one may say nothing yet."""
    stats = [
        SchedulerStats(
            replica=index,
            transfer=None if count is None else msgspec.structs.replace(STATS, bytes_total=count),
        )
        for index, count in enumerate(counts)
    ]
    found = exposed(stats)
    said = [index for index, count in enumerate(counts) if count is not None]
    assert len(found) == len(said) * (len(TRANSFER_METRIC_NAMES) + 1)
    for index in said:
        assert found["interlock:kv_transfer_bytes_total", str(index), "prefill"] == counts[index]
        assert found["interlock:pd_requests", str(index), "computing"] == 2
        assert found["interlock:pd_requests", str(index), "sending"] == 1
        assert found["interlock:pd_pages_quarantined", str(index), "prefill"] == 7


def test_load_has_the_role_and_the_transfers(http: httpx.Client, engine: FakeEngine) -> None:
    engine.extra_stats = SchedulerStats(receiving=1, transfer=STATS)
    load = http.get("/load").json()
    assert load["role"] == engine.plan.disaggregation_mode
    (replica,) = load["replicas"]
    assert replica["transfer"] == msgspec.to_builtins(STATS)
    assert 'interlock:pd_peers{model_name="tiny",replica="0",role="prefill"} 2.0' in http.get("/metrics").text


def test_a_server_of_both_phases_has_no_transfers(http: httpx.Client) -> None:
    assert http.get("/load").json()["replicas"][0]["transfer"] is None
    assert "interlock:pd_peers{" not in http.get("/metrics").text
