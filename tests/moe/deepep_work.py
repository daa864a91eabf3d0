"""What rank processes of the DeepEP tests do; a module that they can import."""

from __future__ import annotations

import sys
from dataclasses import replace

from interlock.moe.a2a.base import DispatcherSpec
from interlock.moe.a2a.deepep_v2 import BACKEND
from interlock.moe.a2a.deepep_v2.dispatcher import DeepEpV2
from interlock.moe.conformance.backend_suite import RankFindings, run_backend_suite
from interlock.parallel.topology import Groups
from tests.moe import elastic_double

ON_CPU = replace(
    BACKEND, devices=frozenset({"cpu"}), dispatcher="tests.moe.deepep_work:ElasticOnCpu", packages=()
)


class ElasticOnCpu(DeepEpV2):
    """The adapter as it is, on a machine without a GPU."""

    def __init__(self, spec: DispatcherSpec) -> None:
        super().__init__(spec, ON_CPU)


def conformance(groups: Groups, cases: int, seed: int) -> RankFindings:
    sys.modules["deep_ep"] = elastic_double.module()
    return run_backend_suite(ON_CPU, groups, device="cpu", cases=cases, seed=seed)
