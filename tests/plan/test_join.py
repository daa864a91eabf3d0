"""Declarations joined: reports A03, A04, A12 and B14. The planner names no backend; nor do these tests'
rules, which use declarations made here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.moe.a2a.backend import A2ABackend
from interlock.moe.experts.base import ExpertRunner
from interlock.moe.terms import Layout, Phase
from interlock.options import Options
from interlock.plan.facts import MachineFacts
from interlock.plan.join import Declarations, exchanges
from interlock.plan.launch_plan import LaunchPlan
from interlock.plan.matrix import matrix, summaries
from interlock.plan.resolve import resolve
from tests.plan.machines import dense_card, gpu_machine, machine, mimo_card, tiny_card

REGISTERED = Declarations.registered()
REPLICATED = frozenset({Layout.REPLICATED})


def plan_for(
    *, declared: Declarations | None = None, facts: MachineFacts | None = None, **asked: object
) -> LaunchPlan:
    return resolve(Options.of(model="m", **asked), tiny_card(), facts or machine(), declared=declared)


def refusal(**arguments: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan_for(**arguments)  # type: ignore[arg-type]
    return caught.value


def with_backend(**changes: object) -> Declarations:
    """What is registered, with one backend that exchanges tokens changed (and still called the same)."""
    changed = replace(REGISTERED.a2a["collective"], **changes)  # type: ignore[arg-type]
    return Declarations({**REGISTERED.a2a, "collective": changed}, REGISTERED.runners)


def with_runner(**changes: object) -> Declarations:
    changed = replace(REGISTERED.runners["cpu"], **changes)  # type: ignore[arg-type]
    return Declarations(REGISTERED.a2a, {**REGISTERED.runners, "cpu": changed})


@pytest.mark.parametrize(
    ("a2a", "runner", "weight_format"),
    list(product(REGISTERED.a2a, REGISTERED.runners, ("float32", "bfloat16", "fp8_block"))),
)
def test_whole_table_is_planned_or_refused_with_both_names(a2a: str, runner: str, weight_format: str) -> None:
    """A03, A04: over the CLI's own lists; a refused pair names both flags, both values and one that works,
    and nothing but the card was read."""
    card = tiny_card(
        weight_format=weight_format, dtype="float32" if weight_format == "float32" else "bfloat16"
    )
    options = Options.of(model="m", tp_size=2, moe_a2a_backend=a2a, moe_runner_backend=runner)
    declared = REGISTERED.runners[runner]
    if "cpu" not in REGISTERED.a2a[a2a].devices:
        with pytest.raises(Refusal, match=f"--moe-a2a-backend {a2a}: .*not on cpu"):
            resolve(options, card, machine())
        return
    if "cpu" not in declared.devices or weight_format not in declared.weight_formats:
        with pytest.raises(Refusal) as caught:
            resolve(options, card, machine())
        for word in (
            f"--moe-runner-backend {runner}",
            f"--moe-a2a-backend {a2a}",
            "not on cpu" if "cpu" not in declared.devices else f"not {weight_format}",
            "what would work",
        ):
            assert word in str(caught.value)
        return
    plan = resolve(options, card, machine())
    assert (plan.moe_a2a_backend, plan.moe_runner_backend) == (a2a, runner)
    for layout in (plan.moe_layout_prefill, plan.moe_layout_decode):
        assert layout in {str(each) for each in REGISTERED.runners[runner].layouts}


def test_a_pair_without_a_shared_layout_names_both_and_what_works() -> None:
    """A04: the message holds both flags, both values and an allowed value."""
    declared = with_runner(layouts=REPLICATED)
    text = str(refusal(declared=declared, tp_size=2, moe_a2a_backend="collective", moe_runner_backend="cpu"))
    for word in ("--moe-runner-backend cpu", "--moe-a2a-backend collective", "--moe-runner-backend torch"):
        assert word in text


def test_auto_passes_over_a_runner_that_does_not_go_with_the_backend() -> None:
    """A runner picked without looking at the backend is impossible: the join decides, and says why."""
    plan = plan_for(declared=with_runner(layouts=REPLICATED), tp_size=2, moe_a2a_backend="collective")
    assert plan.moe_runner_backend == "torch"
    assert "cpu in prefill it takes rows as replicated" in plan.provenance["moe_runner_backend"].reason


def test_no_runner_at_all_is_refused_with_every_reason() -> None:
    declared = Declarations(
        REGISTERED.a2a, {name: replace(r, layouts=REPLICATED) for name, r in REGISTERED.runners.items()}
    )
    found = refusal(declared=declared, tp_size=2, moe_a2a_backend="collective")
    assert found.option == "--moe-a2a-backend"
    for name in REGISTERED.runners:
        assert name in found.rule
    assert found.alternatives


def test_a_missing_package_is_found_before_weights(tmp_path: Path) -> None:
    """A12: package and flag in the text; the model path holds no weight to open."""
    declared = with_backend(packages=("fastlink>=2",))
    found = refusal(declared=declared, tp_size=2, moe_a2a_backend="collective")
    assert found.option == "--moe-a2a-backend"
    assert "pip install 'fastlink>=2'" in found.rule
    old = machine(packages={"torch": "2.13.0+cpu", "fastlink": "1.9"})
    assert (
        "1.9 is installed"
        in refusal(declared=declared, facts=old, tp_size=2, moe_a2a_backend="collective").rule
    )
    new = machine(packages={"torch": "2.13.0+cpu", "fastlink": "2.1"})
    assert plan_for(declared=declared, facts=new, tp_size=2, moe_a2a_backend="collective").ep_size == 2
    assert "fastlink" in declared.packages()


@pytest.mark.parametrize("hidden", [64, 96, 200, 256, 3072])
def test_a_hidden_size_the_backend_cannot_carry(hidden: int) -> None:
    """B14: refused at plan time with the size and the multiple, or planned."""
    options = Options.of(model="m", tp_size=2, moe_a2a_backend="collective")
    declared = with_backend(hidden_multiple=128)
    card = tiny_card(hidden_size=hidden)
    if hidden % 128 == 0:
        assert resolve(options, card, machine(), declared=declared).ep_size == 2
        return
    with pytest.raises(Refusal, match=f"multiple of 128, not {hidden}"):
        resolve(options, card, machine(), declared=declared)


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        ({"devices": frozenset({"cuda"})}, {}, "runs on cuda, not on cpu"),
        ({"row_dtypes": frozenset({"bfloat16"})}, {}, "carries rows of bfloat16, not float32"),
        ({"min_ranks": 4}, {}, "at least 4 expert-parallel ranks, not 2"),
        ({"max_ranks": 1}, {}, "at most 1 expert-parallel ranks, not 2"),
        (
            {"links": frozenset({"shared_memory"})},
            {"nnodes": 2, "dist_init": "a:1"},
            "ranks of one machine only",
        ),
    ],
)
def test_declared_limits_are_refused(
    changes: dict[str, object], asked: dict[str, object], words: str
) -> None:
    found = refusal(declared=with_backend(**changes), tp_size=2, moe_a2a_backend="collective", **asked)
    assert words in found.rule
    assert "--moe-a2a-backend none" in found.alternatives


def test_a_backend_that_needs_native_code_says_what_is_missing() -> None:
    facts = machine(native_kernels_problem="no C++ compiler is on PATH")
    found = refusal(facts=facts, tp_size=2, moe_a2a_backend="shared_memory")
    assert "no C++ compiler" in found.rule


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        ({"devices": frozenset({"cuda"})}, {}, "runs on cuda"),
        ({"kernels": frozenset({"torch"})}, {}, "needs --kernels torch, not cpu"),
        ({"activation_dtypes": frozenset({"bfloat16"})}, {}, "computes in bfloat16, not float32"),
        ({"weight_formats": frozenset({"fp8_block"})}, {}, "loads weights in fp8_block, not float32"),
        ({"row_invariant": False}, {"deterministic": True}, "not row-invariant"),
    ],
)
def test_runner_limits_are_refused(changes: dict[str, object], asked: dict[str, object], words: str) -> None:
    found = refusal(declared=with_runner(**changes), moe_runner_backend="cpu", **asked)
    assert found.option == "--moe-runner-backend"
    assert words in found.rule


def test_a_partial_ep_group_where_the_backend_allows_it() -> None:
    declared = with_backend(requires_full_ep=False)
    plan = plan_for(declared=declared, tp_size=4, ep_size=2, moe_a2a_backend="collective")
    assert (plan.ep_size, plan.experts_tp_size) == (2, 2)
    assert "must be tp-size" in refusal(tp_size=4, ep_size=2, moe_a2a_backend="collective").rule


def test_weights_stay_in_blocks_only_where_the_runner_keeps_them() -> None:
    card = mimo_card()
    facts = gpu_machine()
    options = Options.of(model="m", tp_size=8, moe_runner_backend="torch")
    keeping = Declarations(REGISTERED.a2a, {"torch": replace(REGISTERED.runners["torch"], dequantises=False)})
    wide = resolve(options, card, facts)
    narrow = resolve(options, card, facts, declared=keeping)
    assert narrow.memory.weights < 0.55 * wide.memory.weights


def test_models_without_experts_refuse_what_would_be_inert() -> None:
    """A01: an a2a option on a model that has nothing to exchange is not accepted."""
    for asked in ({"moe_a2a_backend": "collective"}, {"moe_runner_backend": "torch"}, {"ep_size": 2}):
        options = Options.of(model="m", tp_size=2, **asked)
        with pytest.raises(Refusal):
            resolve(options, dense_card(), machine())
    assert resolve(Options.of(model="m"), dense_card(), machine()).moe_runner_backend == "none"


def test_matrix_covers_every_combination_with_a_reason_where_it_is_not_ready() -> None:
    cells = list(matrix(REGISTERED, machine(), device="cpu", kernels="cpu"))
    assert len(cells) == len(REGISTERED.a2a) * len(REGISTERED.runners) * 3 * len(Phase)
    for cell in cells:
        runner = REGISTERED.runners[cell.runner]
        runs_here = "cpu" in runner.devices & REGISTERED.a2a[cell.a2a].devices
        loads = cell.weight_format in runner.weight_formats
        assert (cell.problem is None and cell.layout is not None) == (runs_here and loads)
        assert runs_here or "not on cpu" in str(cell.problem)
        assert not runs_here or loads or f"not {cell.weight_format}" in str(cell.problem)
    on_gpu = list(matrix(REGISTERED, gpu_machine(), device="cuda", kernels="torch"))
    problems = {cell.problem for cell in on_gpu if cell.a2a == "shared_memory"}
    assert problems == {"runs on cpu, not on cuda"}
    unshared = list(matrix(with_runner(layouts=REPLICATED), machine(), device="cpu", kernels="cpu"))
    assert any("share no layout" in str(cell.problem) for cell in unshared)


def test_summaries_tell_what_moves_no_tokens() -> None:
    rows = {name: text for kind, name, text in summaries(REGISTERED) if kind == "a2a"}
    for name, backend in REGISTERED.a2a.items():
        assert ("moves no tokens" in rows[name]) == (not exchanges(backend))


def test_no_name_of_a_backend_is_in_the_planner() -> None:
    """Contracts, not chains: only the default of the option, kernel sets and links are spelled out."""
    folder = Path(__file__).parents[2] / "src" / "interlock" / "plan"
    links = {link for backend in REGISTERED.a2a.values() for link in backend.links}
    names = {*REGISTERED.a2a, *REGISTERED.runners} - {"none", "torch", "cpu", "triton"} - links
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert not [name for name in names if f'"{name}"' in text], file.name


def test_declarations_are_complete() -> None:
    assert all(isinstance(backend, A2ABackend) for backend in REGISTERED.a2a.values())
    assert all(isinstance(runner, ExpertRunner) for runner in REGISTERED.runners.values())


def test_flashinfer_is_refused_with_its_true_limits() -> None:
    """On an H200 without the package; on a Blackwell GPU with it; and where it would serve."""
    card = mimo_card(num_hidden_layers=2, n_routed_experts=16)
    hopper, blackwell = gpu_machine(gpus=1), gpu_machine(gpus=1, capability="10.0")
    package = {"flashinfer-python": "0.7.4"}
    with_package = msgspec.structs.replace(hopper, packages={**hopper.packages, **package})
    new = msgspec.structs.replace(blackwell, packages={**blackwell.packages, **package})
    for runner, facts, words in (
        ("flashinfer_cutlass", hopper, "needs the package flashinfer-python>=0.6, which is not installed"),
        ("flashinfer_cutlass", new, "needs a GPU of compute capability 9.0, not 10.0"),
        ("flashinfer_trtllm", with_package, "needs a GPU of compute capability 10.0 to 10.9, not 9.0"),
        ("flashinfer_trtllm", new, "no adapter in this version"),
    ):
        with pytest.raises(Refusal) as caught:
            resolve(Options.of(model="m", moe_runner_backend=runner), card, facts)
        assert words in caught.value.rule
        assert caught.value.alternatives
    options = Options.of(model="m", moe_runner_backend="flashinfer_cutlass")
    assert resolve(options, card, with_package).expert_weight_format == "fp8_block"


def test_auto_says_what_it_chose_and_what_it_passed_over() -> None:
    card = mimo_card(num_hidden_layers=2, n_routed_experts=16)
    reason = resolve(Options.of(model="m"), card, gpu_machine(gpus=1)).provenance["moe_runner_backend"].reason
    assert "computes fp8_block weights on cuda in layouts of --moe-a2a-backend none" in reason
    assert "deep_gemm needs the package sgl-deep-gemm" in reason or "fastest_fp8 needs the package" in reason
    old = resolve(Options.of(model="m"), card, gpu_machine(gpus=1, capability="8.0"))
    assert "triton_fp8 needs a GPU of compute capability 9.0 to 9.9, not 8.0" in (
        old.provenance["moe_runner_backend"].reason
    )
