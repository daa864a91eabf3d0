"""What weights are held in: the checkpoint's fp8 blocks where machine and shapes allow, or why not."""

from __future__ import annotations

import msgspec
import pytest

from interlock.errors import Refusal
from interlock.options import Options
from interlock.plan.card import ModelCard
from interlock.plan.facts import MachineFacts
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.nearest import read_flags
from interlock.plan.resolve import resolve
from tests.plan.machines import gpu_machine, machine, mimo_card, mimo_pro_card, tiny_card

FP8, BF16 = "fp8_block", "bfloat16"


def flash(layers: int = 3, **changes: object) -> ModelCard:
    return mimo_card(num_hidden_layers=layers, n_routed_experts=32, **changes)


def plan_for(card: ModelCard, facts: MachineFacts | None = None, **asked: object) -> LaunchPlan:
    return resolve(Options.of(model="m", **asked), card, facts or gpu_machine(gpus=1))


def formats(plan: LaunchPlan) -> tuple[str, str, str]:
    return plan.attention_weight_format, plan.mlp_weight_format, plan.expert_weight_format


def test_a_hopper_keeps_the_checkpoints_blocks() -> None:
    plan = plan_for(flash())
    assert formats(plan) == (FP8, FP8, FP8)
    assert plan.moe_runner_backend == "triton_fp8"
    assert plan.provenance["attention_weight_format"].source is Source.MODEL
    assert "as they are" in plan.provenance["expert_weight_format"].reason


@pytest.mark.parametrize(
    ("facts", "asked", "reason"),
    [
        (machine(), {}, "--kernels cpu compute linears in float32 or bfloat16"),
        (gpu_machine(gpus=1, capability="8.0"), {}, "need a GPU of compute capability 9.0, and one has 8.0"),
        (gpu_machine(gpus=1, triton=None), {}, "--kernels torch compute"),
        (gpu_machine(gpus=1), {"dtype": "float32"}, "bfloat16 activations, not float32"),
    ],
)
def test_elsewhere_they_are_dequantised_and_the_plan_says_why(
    facts: MachineFacts, asked: dict[str, object], reason: str
) -> None:
    plan = plan_for(flash(), facts, **asked)
    assert formats(plan) == (plan.dtype,) * 3
    assert reason in plan.provenance["attention_weight_format"].reason
    assert reason in plan.provenance["mlp_weight_format"].reason
    assert "dequantises" in plan.provenance["expert_weight_format"].reason
    if plan.kernels == "torch":
        return
    with pytest.raises(Refusal) as caught:
        plan_for(flash(), facts, quantization="fp8", **asked)
    assert caught.value.option == "--quantization"
    assert "--quantization none" in caught.value.alternatives


def test_references_compute_fp8_anywhere_when_asked() -> None:
    plan = plan_for(flash(), machine(), quantization="fp8", kernels="torch", dtype="float32")
    assert formats(plan) == (FP8,) * 3
    assert (plan.kernels, plan.moe_runner_backend) == ("torch", "torch_fp8")
    assert formats(plan_for(flash(), machine(), kernels="torch")) == (BF16,) * 3


def test_none_dequantises_everything() -> None:
    plan = plan_for(flash(), quantization="none")
    assert formats(plan) == (BF16,) * 3
    assert plan.moe_runner_backend == "triton"
    assert plan.provenance["expert_weight_format"].source is Source.USER
    assert plan.memory.weights > 1.9 * plan_for(flash()).memory.weights - 3 * 2**30


def test_a_runner_that_contradicts_the_format_is_refused() -> None:
    for runner, quantization, words in (
        ("triton", "fp8", "holds weights in bfloat16, and --quantization fp8 wants fp8 blocks"),
        ("triton_fp8", "none", "holds weights in fp8_block, and --quantization none wants bfloat16"),
    ):
        with pytest.raises(Refusal, match=words):
            plan_for(flash(), quantization=quantization, moe_runner_backend=runner)


def test_bfloat16_checkpoints_are_quantised_when_asked() -> None:
    card = flash(quantization_config=None)
    assert formats(plan_for(card)) == (BF16,) * 3
    plan = plan_for(card, quantization="fp8")
    assert formats(plan) == (FP8,) * 3
    assert "quantised while loading" in plan.provenance["expert_weight_format"].reason
    assert formats(plan_for(card, machine(), quantization="none")) == (BF16,) * 3


def test_slices_that_are_no_whole_blocks_are_dequantised_or_refused_with_sizes_that_work() -> None:
    """D01: a dense width of 1152 is nine blocks, which two ranks cannot share."""
    facts, card = gpu_machine(gpus=2), flash(intermediate_size=1152)
    plan = plan_for(card, facts, tp_size=2)
    assert formats(plan) == (FP8, BF16, FP8)
    assert "the dense width 1152 over 2 ranks is no multiple of the block of 128" in (
        plan.provenance["mlp_weight_format"].reason
    )
    with pytest.raises(Refusal, match="the dense width 1152 over 2 ranks") as caught:
        plan_for(card, facts, tp_size=2, quantization="fp8")
    assert "--attn-dp-size 2" in caught.value.alternatives
    for text in caught.value.alternatives:
        options = Options.of(model="m", tp_size=2, quantization="fp8").changed(read_flags(text))
        resolve(options, card, facts)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_that_begin_within_a_block_are_covered_by_whole_ones(tp: int) -> None:
    """D01: k heads of 192 rows over four ranks (Flash), k and v of every chunk of a fused tensor (V2.5)."""
    facts = gpu_machine(gpus=8)
    assert formats(plan_for(flash(), facts, tp_size=tp)) == (FP8,) * 3
    pro = msgspec.structs.replace(mimo_pro_card(), layers=mimo_pro_card().layers[:2])
    pro = msgspec.structs.replace(pro, experts=msgspec.structs.replace(pro.experts, num_experts=16))
    for asked in ({}, {"load_format": "dummy"}, {"qkv_layout": "chunked"}):
        assert formats(plan_for(pro, facts, tp_size=tp, **asked)) == (FP8,) * 3


def test_other_blocks_are_dequantised() -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    plan = plan_for(flash(quantization_config=quantised))
    assert formats(plan) == (BF16,) * 3
    assert "blocks of 128x128, and the checkpoint has 64x128" in (plan.provenance["mlp_weight_format"].reason)
    assert "blocks of 128x128, not 64x128" in plan.provenance["moe_runner_backend"].reason


def test_a_hidden_size_that_the_fp8_kernels_cannot_take() -> None:
    card = tiny_card(weight_format="fp8_block", dtype="bfloat16", hidden_size=264)
    plan = plan_for(card)
    assert formats(plan) == (BF16,) * 3
    assert "needs a hidden size that is a multiple of 128, not 264" in (
        plan.provenance["moe_runner_backend"].reason
    )


def test_weights_of_twelve_layers_of_mimo_v2_flash() -> None:
    """73.4 G weights: experts, q, k, v and the dense MLP in one byte, o_proj, head and embedding in two."""
    plan = plan_for(mimo_card(), load_format="dummy", num_hidden_layers=12)
    kinds = [layer.attention for layer in plan.card.layers]
    assert [index for index, kind in enumerate(kinds) if kind.window is None] == [0, 5, 11]
    assert [layer.is_moe for layer in plan.card.layers] == [False] + [True] * 11
    hidden, two_bytes = 4096, 2 * 152576 * 4096 + 12 * 8192 * 4096
    exact = plan.card.parameters + two_bytes + 11 * 3 * 256 * hidden
    assert plan.memory.weights == pytest.approx(exact, rel=0.002)


def test_cutting_a_model() -> None:
    assert plan_for(mimo_card(), load_format="dummy", num_hidden_layers=2).num_hidden_layers == 2
    whole = plan_for(flash())
    assert whole.num_hidden_layers == 3
    cut = plan_for(flash(), load_format="dummy", num_hidden_layers=2)
    assert cut.card.config_hash != whole.card.config_hash
    assert cut.card.parameters < whole.card.parameters
    with pytest.raises(Refusal, match="only made-up weights can be cut") as caught:
        plan_for(flash(), num_hidden_layers=2)
    assert caught.value.alternatives[0] == "--load-format dummy"
    with pytest.raises(Refusal, match="the model has 3 layers") as caught:
        plan_for(flash(), num_hidden_layers=4)
    assert caught.value.alternatives[0] == "--num-hidden-layers 3"
