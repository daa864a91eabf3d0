from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from interlock.demo.tiny import TinySpec, tiny_weights, write_tiny, write_tiny_reference
from interlock.demo.tiny_tokenizer import tiny_tokenizer
from interlock.errors import InterlockError
from interlock.tokenizer import load_tokenizer

IDS = [(i * 37 + 11) % 500 + 3 for i in range(40)]
SMALL = TinySpec(hidden_size=64, layers=3, head_dim=24, v_head_dim=16, experts=4, moe_intermediate_size=20)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Element by element, as the format is defined."""
    rows = torch.arange(weight.shape[0]) // 128
    columns = torch.arange(weight.shape[1]) // 128
    return weight.float() * scale[rows][:, columns]


def logits(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        result: torch.Tensor = model.eval()(torch.tensor([ids])).logits[0]
    return result


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    first = digests(write_tiny(tmp_path / "a", SMALL))
    assert digests(write_tiny(tmp_path / "b", SMALL)) == first
    other = digests(write_tiny(tmp_path / "c", SMALL.replace(seed=1)))
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


def test_the_default_shows_every_feature(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert config["architectures"] == ["MiMoV2ForCausalLM"]
    assert config["hybrid_layer_pattern"] == [0, 1, 1, 1, 1, 0, 1]
    assert config["moe_layer_freq"] == [0, 1, 1, 1, 1, 1, 1]
    assert (config["head_dim"], config["v_head_dim"], config["sliding_window"]) == (192, 128, 16)
    assert (config["attention_value_scale"], config["partial_rotary_factor"]) == (0.707, 0.334)
    qkv = tensors["model.layers.0.self_attn.qkv_proj.weight"]
    scale = tensors["model.layers.0.self_attn.qkv_proj.weight_scale_inv"]
    assert qkv.dtype == torch.float8_e4m3fn
    assert qkv.shape == (4 * 1088, 256)
    assert scale.shape == (4 * 9, 2), (
        "9 scale rows for each chunk of 8.5 blocks; 34 would be the plain layout"
    )
    assert "model.layers.1.self_attn.attention_sink_bias" in tensors
    assert "model.layers.0.self_attn.attention_sink_bias" not in tensors
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert bias.abs().min() > 0
    expert = tensors["model.layers.1.mlp.experts.0.gate_proj.weight"]
    assert expert.shape[0] % 128, "a partial edge block"


@pytest.mark.parametrize("qkv", ["split", "plain", "chunked"])
@pytest.mark.parametrize("fp8", [True, False])
def test_stored_tensors_hold_the_reference_values(qkv: str, fp8: bool) -> None:
    spec = SMALL.replace(qkv=qkv, fp8=fp8)
    weights = tiny_weights(spec)
    for name, stored in weights.stored.items():
        if name.endswith("_scale_inv") or "qkv_proj" in name:
            continue
        scale = weights.stored.get(name + "_scale_inv")
        plain = stored.float() if scale is None else dequantise(stored, scale)
        assert torch.equal(plain, weights.reference[name]), name


@pytest.mark.parametrize("fp8", [True, False])
def test_chunk_c_holds_the_heads_of_group_c(fp8: bool) -> None:
    spec = SMALL.replace(fp8=fp8, pattern=(0, 1, 0))
    weights = tiny_weights(spec)
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn."
        fused, scale = (
            weights.stored.get(prefix + name) for name in ("qkv_proj.weight", "qkv_proj.weight_scale_inv")
        )
        assert fused is not None
        q, k, v = (weights.reference[f"{prefix}{x}_proj.weight"] for x in "qkv")
        rows = len(fused) // spec.num_kv_heads
        for c in range(spec.num_kv_heads):
            chunk = fused[c * rows : (c + 1) * rows]
            if scale is None:
                plain = chunk.float()
            else:
                blocks = len(scale) // spec.num_kv_heads
                plain = dequantise(chunk, scale[c * blocks : (c + 1) * blocks])
            expected = torch.cat([t.chunk(spec.num_kv_heads)[c] for t in (q, k, v)])
            assert torch.equal(plain, expected)


def test_the_reference_runs_in_transformers_and_is_lively(tmp_path: Path) -> None:
    out = logits(write_tiny_reference(tmp_path))
    assert 0.8 < out.std() < 3
    assert len(set(out.argmax(-1).tolist())) > 20


def test_a_split_checkpoint_equals_its_reference(tmp_path: Path) -> None:
    spec = TinySpec(qkv="split", fp8=False, dtype="float32")
    plain = logits(write_tiny(tmp_path / "a", spec))
    assert torch.equal(plain, logits(write_tiny_reference(tmp_path / "b", spec)))


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_moe_runs_in_transformers(tmp_path: Path, tied: bool) -> None:
    spec = TinySpec.qwen3_moe(tie_word_embeddings=tied, dense_layers=1)
    out = logits(write_tiny(tmp_path, spec))
    assert 0.8 < out.std() < 3
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied


def test_shards_and_index_hold_the_same_tensors(tmp_path: Path) -> None:
    one = load_file(write_tiny(tmp_path / "one", SMALL) / "model.safetensors")
    folder = write_tiny(tmp_path / "three", SMALL.replace(shards=3))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert index["weight_map"].keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in one.values())
    for name, file in index["weight_map"].items():
        stored = load_file(folder / file)[name]
        assert torch.equal(stored.view(torch.uint8), one[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "llama"}, "family 'llama'"),
        ({"num_heads": 6}, "6 heads"),
        ({"top_k": 9}, "top_k 9"),
        ({"pattern": (0, 1)}, "pattern"),
        ({"vocab_size": 200}, "vocab_size 200 is below 259"),
        ({"swa_num_kv_heads": 2}, "chunks"),
        ({"family": "qwen3_moe"}, r"TinySpec\.qwen3_moe"),
    ],
)
def test_impossible_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InterlockError, match=message):
        TinySpec(**changes)


@pytest.mark.parametrize("size", [259, 300, 512])
def test_the_tokenizer_fills_the_vocabulary(size: int) -> None:
    vocab = tiny_tokenizer(size).get_vocab()
    assert sorted(vocab.values()) == list(range(size))


def test_the_tokenizer_knows_words(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny(tmp_path, SMALL))
    ids = tokenizer.encode("the signal shows the train")
    assert len(ids) < len("the signal shows the train") / 2
    assert tokenizer.eos_token_ids == (2, 0)
