"""What ``--attention-backend`` becomes, from declarations: refused with reason and way out, or planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from interlock.errors import Refusal
from interlock.nn.attention_backends.base import AttentionBackend, HeadWidths
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.facts import MachineFacts
from interlock.plan.join import Declarations
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, machine, mimo_card, tiny_card

REGISTERED = Declarations.registered()
FLASH = REGISTERED.attention["flash_attention"]
ASKED = {"attention_backend": "flash_attention"}
AUTO = "--attention-backend auto"


def hopper(capability: str = "9.0", version: str | None = "3.0.0") -> MachineFacts:
    facts = gpu_machine(8, capability=capability)
    packages = {**facts.packages} | ({} if version is None else {"flash-attn-3": version})
    return machine(devices=facts.devices, packages=packages, cores=128, nccl=facts.nccl)


def plan(
    facts: MachineFacts, card: ModelCard | None = None, declared: Declarations = REGISTERED, **asked: Any
) -> LaunchPlan:
    options = Options.of(model="m", tp_size=8, **asked)
    return resolve(options, card or mimo_card(), facts, declared=declared)


def refusal(facts: MachineFacts, card: ModelCard | None = None, **arguments: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        plan(facts, card, **arguments)
    assert caught.value.option == "--attention-backend"
    return caught.value


def with_flash(**changes: Any) -> Declarations:
    changed = replace(FLASH, **changes)
    return replace(REGISTERED, attention={**REGISTERED.attention, "flash_attention": changed})


def test_auto_takes_what_computes_everywhere_and_says_that_nothing_was_measured() -> None:
    for facts, reason in (
        (machine(), "flash_attention runs on cuda, not on cpu"),
        (hopper(version=None), "flash_attention needs the package flash-attn-3>=3.0"),
        (hopper(), "flash_attention was never run: it wants a Hopper GPU with the package"),
    ):
        card = mimo_card() if facts.devices else tiny_card()
        made = resolve(Options.of(model="m", tp_size=len(facts.devices) or 1), card, facts)
        item = made.provenance["attention_backend"]
        assert made.attention_backend == "paged_attention"
        assert item.source is Source.RULE
        assert "no stored measurement shows a faster one" in item.reason
        assert reason in item.reason


def test_a_measurement_is_missed_once_it_ran() -> None:
    made = plan(hopper(), declared=with_flash(never_run=""))
    assert "flash_attention was not measured" in made.provenance["attention_backend"].reason


def test_as_asked_where_the_package_is() -> None:
    made = plan(hopper(), **ASKED)
    assert made.attention_backend == "flash_attention"
    assert made.provenance["attention_backend"].source is Source.USER
    assert made.cuda_graph_sizes, "its decode steps can be captured"


@pytest.mark.parametrize(
    ("facts", "asked", "reason", "way_out"),
    [
        (hopper(version=None), {}, "which is not installed (pip install --no-build-isolation", AUTO),
        (hopper(version="2.9"), {}, "needs the package flash-attn-3>=3.0; 2.9 is installed", AUTO),
        (hopper("8.9"), {}, "needs a GPU of compute capability 9.0, not 8.9", AUTO),
        (hopper("10.0"), {}, "needs a GPU of compute capability 9.0, not 10.0", AUTO),
        (
            hopper(),
            {"kv_cache_dtype": "fp8_e4m3"},
            "and --kv-cache-dtype is fp8_e4m3",
            "--kv-cache-dtype auto",
        ),
        (hopper(), {"dtype": "float32"}, "computes in bfloat16, not float32", "--dtype bfloat16"),
    ],
)
def test_refused_with_reason_and_way_out(
    facts: MachineFacts, asked: dict[str, Any], reason: str, way_out: str
) -> None:
    found = refusal(facts, **ASKED, **asked)
    assert reason in found.rule
    assert way_out in found.alternatives


def test_on_a_cpu_and_with_determinism() -> None:
    found = refusal(machine(), tiny_card(), **ASKED)
    assert found.rule == "runs on cuda, not on cpu"
    row_invariant = {**REGISTERED.attention, "flash_attention": replace(FLASH, devices=frozenset({"cpu"}))}
    declared = replace(REGISTERED, attention=row_invariant)
    found = refusal(machine(), tiny_card(), declared=declared, deterministic=True, **ASKED)
    assert found.rule == "is not row-invariant, which --deterministic needs"
    assert AUTO in found.alternatives


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        ({"sinks": False}, {}, "computes no attention sinks, which this model has"),
        ({"windows": False}, {}, "computes no sliding windows, which this model has"),
        (
            {"head_widths": (HeadWidths((8, 256), (8, 256), same=True),)},
            {},
            "computes heads of width 8 to 256 of keys and values alike; this model has keys of 192",
        ),
        ({"page_multiple": 64}, {}, "needs a page size that is a multiple of 64, not 16"),
    ],
)
def test_limits_are_those_that_are_declared(
    changes: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    found = refusal(hopper(), declared=with_flash(**changes), **ASKED, **asked)
    assert reason in found.rule
    assert found.alternatives


def test_a_page_size_that_would_do_is_offered() -> None:
    found = refusal(hopper(), declared=with_flash(page_multiple=64), **ASKED)
    assert "--page-size 64" in found.alternatives


def test_a_backend_that_cannot_be_captured_leaves_no_graphs() -> None:
    made = plan(hopper(), declared=with_flash(capturable=False), **ASKED)
    assert made.cuda_graph_sizes == ()
    assert made.provenance["cuda_graph_sizes"].reason == (
        "--attention-backend flash_attention cannot be captured"
    )


@pytest.mark.parametrize(
    ("qk", "v", "held"),
    [
        (192, 128, True),
        (128, 128, True),
        (256, 256, True),
        (264, 264, False),
        (192, 192, True),
        (192, 96, False),
        (128, 64, False),
        (64, 512, True),
        (64, 520, False),
        (100, 100, False),
        (136, 104, True),
        (24, 16, True),
    ],
)
def test_head_widths_are_those_of_the_library(qk: int, v: int, *, held: bool) -> None:
    """``mha_fwd`` of hopper/flash_api.cpp."""
    assert any(each.hold(qk, v) for each in FLASH.head_widths) is held


def test_one_backend_is_portable_and_has_no_limits() -> None:
    (portable,) = (each for each in REGISTERED.attention.values() if each.portable)
    unlimited = AttentionBackend(
        name=portable.name,
        summary=portable.summary,
        backend=portable.backend,
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16"}),
        capturable=True,
        row_invariant=True,
        portable=True,
    )
    assert portable == unlimited
