"""The same weights in four programs: this engine, its float64 reference, transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from interlock.demo.tiny import TinySpec
from interlock.reference.mimo_v2 import MiMoReference
from interlock.reference.qwen3_moe import Qwen3MoeReference
from tests.harness import build_model, run_chunks
from tests.models.prompts import CHUNKINGS, PROMPT, TOLERANCE, distance
from tests.oracles import llama_cpp_oracle, transformers_oracle
from tests.oracles.gguf_writer import write_gguf
from tests.tiny import flash, tiny_folder, v25

PRO = v25(swa_num_kv_heads=4, value_scale=0.612, seed=3)
POSITIONS = [0, 1, 14, 15, 16, 17, 18, 31, 32, 33, 38, 39]
"""The first tokens, and those around the edges of the window and of the pages."""
FLASH_OTHER = flash(pattern=(0, 1, 1, 0, 1, 0, 1), rope_theta=1e7, seed=5, norm_eps=1e-6)


def check_all_chunkings(
    folder: Path,
    expected: torch.Tensor,
    *,
    positions: Sequence[int] = range(len(PROMPT)),
    window_extra: int = 0,
) -> None:
    """One prefill, and every way to have part of the prompt in the cache already."""
    harness = build_model(folder, sliding_window_extra=window_extra)
    for chunks in CHUNKINGS:
        rows = run_chunks(harness, PROMPT, chunks)[list(positions)]
        assert distance(rows, expected) <= TOLERANCE, chunks


@pytest.mark.parametrize("spec", [flash(), FLASH_OTHER, flash(tie_word_embeddings=True)])
def test_flash_equals_transformers(spec: TinySpec) -> None:
    """E03, E04, E13: split layout; the class of transformers sees one key more than the window says."""
    folder = tiny_folder(spec)
    expected = transformers_oracle.logprobs(folder, PROMPT)
    reference = MiMoReference.load(folder).logprobs(PROMPT, window_extra=1)
    assert distance(reference, expected) <= TOLERANCE
    check_all_chunkings(folder, expected, window_extra=1)


@pytest.mark.parametrize(
    "spec", [v25(), PRO, v25(qkv="plain"), flash(fp8=True)], ids=["v25", "pro", "plain fp8", "split fp8"]
)
def test_fp8_layouts_equal_llama_cpp(spec: TinySpec, tmp_path: Path) -> None:
    """E03, E04, E13, D02, D03: fused and split fp8 blocks with partial edges; the window is what it says."""
    folder = tiny_folder(spec)
    reference = MiMoReference.load(folder)
    server = llama_cpp_oracle.server(write_gguf(reference, tmp_path / "m.gguf", visible=spec.window))
    expected = llama_cpp_oracle.prefix_logprobs(server, PROMPT, POSITIONS, spec.vocab_size)
    assert distance(reference.logprobs(PROMPT)[POSITIONS], expected) <= TOLERANCE
    check_all_chunkings(folder, expected, positions=POSITIONS)


def test_decoding_equals_llama_cpp(tmp_path: Path) -> None:
    """Prefill, then single tokens, in both engines with their own caches."""
    folder, steps = tiny_folder(v25()), 8
    server = llama_cpp_oracle.server(
        write_gguf(MiMoReference.load(folder), tmp_path / "m.gguf", visible=v25().window)
    )
    expected = llama_cpp_oracle.forced_logprobs(server, PROMPT, steps, v25().vocab_size)
    harness = build_model(folder)
    token_ids = PROMPT + [llama_cpp_oracle.FORCED_TOKEN] * (steps - 1)
    rows = run_chunks(harness, token_ids, [len(PROMPT), *[1] * (steps - 1)])
    assert distance(rows[len(PROMPT) - 1 :], expected) <= TOLERANCE


@pytest.mark.parametrize(
    "spec",
    [
        TinySpec.qwen3_moe(),
        TinySpec.qwen3_moe(dense_layers=1, seed=2),
        TinySpec.qwen3_moe(tie_word_embeddings=True, seed=4),
    ],
    ids=["all sparse", "mlp_only_layers", "tied"],
)
def test_qwen3_moe_equals_transformers(spec: TinySpec) -> None:
    """The second family: softmax router, RMSNorm on q and k heads."""
    folder = tiny_folder(spec)
    expected = transformers_oracle.logprobs(folder, PROMPT)
    assert distance(Qwen3MoeReference.load(folder).logprobs(PROMPT), expected) <= TOLERANCE
    check_all_chunkings(folder, expected)


def test_bfloat16_stays_near_the_reference() -> None:
    """Rounded activations move log-probabilities, not the model: a router near a tie may flip."""
    folder = tiny_folder(v25())
    expected = MiMoReference.load(folder).logprobs(PROMPT)
    rows = run_chunks(build_model(folder, dtype="bfloat16", kv_cache_dtype="bfloat16"), PROMPT, 16)
    assert float((rows - expected).abs().mean()) < 0.15
    assert float((rows.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.8


def test_the_windows_of_two_readings_differ() -> None:
    """Control: sliding_window_extra is not inert."""
    reference = MiMoReference.load(tiny_folder(flash()))
    assert distance(reference.logprobs(PROMPT, window_extra=1), reference.logprobs(PROMPT)) > 0.1
