"""Which runner the stored measurements pick."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import Refusal
from interlock.moe.experts.choice import ExpertShape, best_runner, measurements, parse_measurements
from interlock.moe.experts.registry import expert_runners
from interlock.moe.terms import Layout
from interlock.options import Options
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, mimo_card

SHAPE = ExpertShape(256, 4096, 2048)
TABLE = parse_measurements(
    {
        "measured": [
            {
                "shape": {"experts": 256, "hidden_size": 4096, "intermediate_size": 2048},
                "weight_format": "fp8_block",
                "layout": "replicated",
                "microseconds": {"few": {"256": 100, "65536": 1000}, "many": {"256": 400, "65536": 500}},
            },
            {
                "shape": {"experts": 128, "hidden_size": 2048, "intermediate_size": 768},
                "weight_format": "fp8_block",
                "layout": "replicated",
                "microseconds": {"few": {"256": 10}},
            },
        ]
    }
)


def pick(rows: int, shape: ExpertShape = SHAPE, names: tuple[str, ...] = ("few", "many")):
    return best_runner(names, shape, "fp8_block", Layout.REPLICATED, rows, table=TABLE)


def test_the_faster_one_is_picked_and_the_reason_names_the_other() -> None:
    assert pick(256).runner == "few"
    assert pick(65536).runner == "many"
    assert pick(65536).microseconds == pytest.approx(500)
    assert "few 1000 us" in pick(65536).why
    assert pick(65536).compared


def test_times_are_interpolated_on_logarithmic_axes() -> None:
    middle = pick(4096, names=("few",))
    assert middle.microseconds == pytest.approx((100 * 1000) ** 0.5)
    assert pick(1, names=("few",)).microseconds == pytest.approx(100)
    assert pick(1 << 20, names=("few",)).microseconds == pytest.approx(1000)


def test_a_slice_of_the_experts_is_judged_by_rows_an_expert() -> None:
    assert pick(8192, ExpertShape(32, 4096, 2048)).runner == pick(65536).runner == "many"
    assert pick(32, ExpertShape(32, 4096, 2048)).runner == "few"


def test_what_was_not_measured_is_said() -> None:
    near = pick(256, ExpertShape(128, 2048, 768))
    assert (near.runner, near.compared) == ("few", False)
    assert "the only one measured" in near.why
    other = best_runner(("many", "few"), SHAPE, "bfloat16", Layout.MASKED, 8, table=TABLE)
    assert (other.runner, other.microseconds, other.compared) == ("many", None, False)


@given(rows=st.integers(1, 1 << 20), experts=st.sampled_from([1, 24, 256]))
def test_the_stored_table_answers_everything(rows: int, experts: int) -> None:
    found = best_runner(
        ("triton_fp8", "deep_gemm"), ExpertShape(experts, 6144, 2048), "fp8_block", Layout.REPLICATED, rows
    )
    assert found.microseconds is not None
    assert 1 < found.microseconds < 1e5


def test_the_stored_table_is_sane_and_light() -> None:
    for entry in measurements():
        for points in entry.times.values():
            rows = [point[0] for point in points]
            assert rows == sorted(set(rows))
            assert all(time > 0 for _, time in points)
    check = (
        "import sys, interlock.moe.experts.choice as c; c.measurements(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_declarations_need_the_package_and_a_hopper() -> None:
    for name in ("deep_gemm", "fastest_fp8"):
        declared = expert_runners().get(name)
        assert declared.packages == ("sgl-deep-gemm>=0.1.4,<0.2", "triton")
        assert (declared.min_capability, declared.max_capability) == ((9, 0), (9, 9))
        assert declared.hidden_multiple == declared.alignment == 128
        assert declared.weight_formats == {"fp8_block"}


def test_auto_takes_both_where_the_package_is_installed_and_says_why_not_elsewhere() -> None:
    card = mimo_card(num_hidden_layers=3, n_routed_experts=32)
    bare = gpu_machine(gpus=1)
    packages = {**bare.packages, "sgl-deep-gemm": "0.1.4"}
    plan = resolve(Options.of(model="m"), card, msgspec.structs.replace(bare, packages=packages))
    assert plan.moe_runner_backend == "fastest_fp8"
    plan = resolve(Options.of(model="m"), card, bare)
    assert plan.moe_runner_backend == "triton_fp8"
    assert "pip install 'sgl-deep-gemm" in plan.provenance["moe_runner_backend"].reason
    with pytest.raises(Refusal, match=r"needs the package sgl-deep-gemm>=0.1.4,<0.2, which is not installed"):
        resolve(Options.of(model="m", moe_runner_backend="deep_gemm"), card, bare)
