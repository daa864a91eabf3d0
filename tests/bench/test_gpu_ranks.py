"""What the session of several ranks on GPUs would start, planned for the machines that it is meant for."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from interlock.launch import plan_launch
from interlock.option_text import options_of
from tests.plan.machines import gpu_machine

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_ranks")


def arms(command: list[str]) -> list[str]:
    """The launch options in a command of verify or bench."""
    flags = ("--control", "--candidate", "--arm")
    return [
        word.partition("=")[2] if flag == "--arm" else word
        for flag, word in pairwise(command)
        if flag in flags
    ]


@pytest.mark.parametrize(("ranks", "sharing", "layers"), [(8, 1, 48), (4, 4, 4)])
def test_every_launch_is_planned_and_takes_the_backend_that_it_names(
    session: ModuleType, ranks: int, sharing: int, layers: int
) -> None:
    facts = gpu_machine(ranks // sharing)
    facts = replace(
        facts,
        packages=dict(facts.packages) | {"deep_ep": "2.1.0", "sgl-deep-gemm": "0.1.4"},
        environment={"EP_DISABLE_GIN": "1"},
    )
    asked = session.Session(ranks, sharing, ("collective", "deepep_v2", "symmetric"), layers, "results")
    stages = session.stages(asked)
    assert len({stage.name for stage in stages}) == len(stages)
    planned = 0
    for stage in stages:
        launches = arms(stage.command)
        if stage.name.startswith("demo-"):
            continue
        model = next((word for word in stage.command if word.startswith(("tiny", "shape:"))), "")
        for text in launches:
            plan = plan_launch(model, options_of(text, "--arm"), facts)
            assert f"--moe-a2a-backend {plan.moe_a2a_backend}" in text
            assert (plan.tp_size, plan.ranks_per_gpu) == (ranks, sharing)
            planned += 1
    assert planned == 2 * 4 + 4 + 4 + 4


def test_the_control_is_not_verified_against_itself(session: ModuleType) -> None:
    asked = session.Session(4, 4, ("collective", "symmetric"), 4, "results")
    names = [stage.name for stage in session.stages(asked)]
    assert {"conformance-collective", "conformance-symmetric", "demo-symmetric"} <= set(names)
    assert "demo-collective" not in names
