"""Prefill and decode servers over the transfer libraries of others: the same answers, whole and streamed."""

from __future__ import annotations

import pytest

from tests.e2e.test_disaggregation import OURS_ONLY, REQUESTS, clustered, compare, killed_and_back, streamed
from tests.kv.transfer.backends import need


@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
def test_the_same_answer_and_stream(backend: str) -> None:
    """Case H09 over HTTP; the pages of every request come free, and a server that was killed comes back."""
    need(backend)
    with clustered(backend) as cluster:
        for path, body in [*REQUESTS, *OURS_ONLY]:
            compare(cluster, cluster.proxy, path, body)
        for path, body in (REQUESTS[0], REQUESTS[3], REQUESTS[4], REQUESTS[8]):
            assert streamed(cluster.proxy + path, body) == streamed(cluster.plain.url + path, body)
        cluster.wait_free()
        for role in ("prefill", "decode"):
            killed_and_back(cluster, role)
