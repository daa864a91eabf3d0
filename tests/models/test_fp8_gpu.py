"""fp8 checkpoints and dummy weights on a CUDA device (``pytest -m gpu``): loaded as they are, and right.

What they must give is emulated on the CPU: the same fp8 weights and quantised activations in plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interlock.checkpoint.dummy import DummyWeights
from interlock.models.decoder_weights import decoder_specs
from tests.harness import Harness, build_model, run_chunks
from tests.models import real_width
from tests.models.prompts import PROMPT
from tests.models.test_dummy_weights import card, config_only
from tests.tiny import flash, tiny_folder

pytestmark = pytest.mark.gpu
FP8 = "fp8_block"
SPEC = flash(
    fp8=True,
    dtype="bfloat16",
    layers=6,
    intermediate_size=384,
    experts=16,
    top_k=4,
    moe_intermediate_size=128,
)
HELD: dict[str, Any] = {
    "device": "cuda",
    "kernels": "triton",
    "dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "moe_runner_backend": "triton_fp8",
    "attention_weight_format": FP8,
    "mlp_weight_format": FP8,
    "expert_weight_format": FP8,
}


EMULATED = real_width.EMULATED


@pytest.fixture(autouse=True)
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Error of the median row: rounding may move single tokens to another expert."""
    got, want = got.double().cpu(), want.double()
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())


def formats(harness: Harness) -> tuple[object, ...]:
    held = harness.model.observed()
    experts = {layer.weight_format for layer in harness.model.context.moe.layers}
    return held["attention_weight_format"], held["mlp_weight_format"], experts


def test_a_checkpoint_is_held_in_its_own_blocks_and_gives_its_own_logits() -> None:
    folder = tiny_folder(SPEC)
    harness = build_model(folder, **HELD)
    assert formats(harness) == (FP8, FP8, {FP8})
    want = run_chunks(build_model(folder, **EMULATED), PROMPT)
    assert relative(run_chunks(harness, PROMPT), want) < 0.03
    assert relative(run_chunks(build_model(folder, **HELD), PROMPT, 7), want) < 0.03


def test_dequantised_weights_come_nearer() -> None:
    folder = tiny_folder(SPEC)
    plain = {**HELD, "moe_runner_backend": "triton"} | dict.fromkeys(
        ("attention_weight_format", "mlp_weight_format", "expert_weight_format"), "bfloat16"
    )
    harness = build_model(folder, **plain)
    assert formats(harness) == ("bfloat16", "bfloat16", {"bfloat16"})
    assert relative(run_chunks(harness, PROMPT), run_chunks(build_model(folder), PROMPT)) < 0.03


def test_a_float_checkpoint_is_quantised_while_loading() -> None:
    folder = tiny_folder(SPEC.replace(fp8=False))
    harness = build_model(folder, **HELD)
    assert formats(harness) == (FP8, FP8, {FP8})
    want = run_chunks(build_model(folder, **EMULATED), PROMPT)
    assert relative(run_chunks(harness, PROMPT), want) < 0.03


def test_an_fp8_cache() -> None:
    folder = tiny_folder(SPEC)
    want = run_chunks(build_model(folder, **EMULATED | {"kv_cache_dtype": "fp8_e4m3"}), PROMPT)
    assert (
        relative(run_chunks(build_model(folder, **HELD | {"kv_cache_dtype": "fp8_e4m3"}), PROMPT), want)
        < 0.12
    )


def test_real_widths_give_the_logits_that_a_cpu_emulated(tmp_path) -> None:
    """Hidden 4096, expert width 2048, 64 heads, window and sinks: prefill in chunks, then decode."""
    harness = real_width.build(tmp_path / "m", **HELD)
    assert formats(harness) == (FP8, FP8, {FP8})
    got, want = real_width.logits(harness), real_width.reference()
    assert relative(got, want) < 0.02
    assert float((got.argmax(1) == want.argmax(1)).float().mean()) > 0.8


@pytest.mark.parametrize("runner", ["triton_fp8", "deep_gemm", "fastest_fp8"])
def test_every_fp8_runner_gives_them(tmp_path, runner) -> None:
    if runner != "triton_fp8":
        pytest.importorskip("deep_gemm")
    harness = real_width.build(tmp_path / "m", **HELD | {"moe_runner_backend": runner})
    assert relative(real_width.logits(harness), real_width.reference()) < 0.02


def test_dummy_weights_are_those_of_the_cpu(tmp_path) -> None:
    found = card(SPEC)
    here, there = (DummyWeights(found, seed=5, device=device) for device in ("cpu", "cuda"))
    for source in (here, there):
        source.validate(list(decoder_specs(found)), ())
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(there.read(name, dtype=dtype).cpu(), here.read(name, dtype=dtype))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert there.read_fp8(name).values.is_cuda
    assert torch.equal(
        there.read_fp8(name).to(torch.device("cpu")).dequantised(torch.float32), here.read(name)
    )
    harness = build_model(config_only(tmp_path / "m", SPEC), load_format="dummy", **HELD)
    assert formats(harness) == (FP8, FP8, {FP8})
    emulated = build_model(config_only(tmp_path / "n", SPEC), load_format="dummy", **EMULATED)
    assert relative(run_chunks(harness, PROMPT), run_chunks(emulated, PROMPT)) < 0.03
