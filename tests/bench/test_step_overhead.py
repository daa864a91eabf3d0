"""The benchmark of a step's overhead goes through the planner and the scheduler as they are now."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from interlock.engine.messages import SamplingParams

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks" / "step_overhead.py"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_overhead", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "step_overhead", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("window", [None, 16])
def test_every_part_of_every_step_is_timed(benchmark_module: ModuleType, window: int | None) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)
    clock = benchmark_module.measure(2, 40, 4, window, sampling)
    parts = {"schedule", "to_step", "sample", "commit", "messages"}
    assert {name: len(times) for name, times in clock.cpu.items()} == dict.fromkeys(parts, 4)
    assert len(clock.wall_ms()) == 4
