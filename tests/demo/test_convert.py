from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interlock.demo.convert import SLICES, moe_bytes, write_moe
from interlock.demo.dense import dense_bytes, write_dense
from interlock.demo.llama import open_llama
from interlock.errors import InterlockError
from interlock.tokenizer import load_tokenizer
from tests.demo_fixture import PROMPTS, DemoModels, demo_models  # noqa: F401

from .tiny_llama import weights, write_llama_folder, write_llama_gguf

IDS = [(i * 37 + 11) % 300 + 3 for i in range(24)]


def logits(folder: Path, ids: list[int] = IDS) -> torch.Tensor:
    return run(load_model(folder), ids)


def load_model(folder: Path):  # type: ignore[no-untyped-def]
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def run(model, ids: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return result


def convert(source: Path, folder: Path) -> Path:
    folder.mkdir()
    write_moe(open_llama(source), folder, converted=lambda n: None, written=lambda n: None)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_the_mixture_computes_the_dense_function(tmp_path: Path) -> None:
    source = write_llama_folder(tmp_path / "source")
    dense, moe = logits(source), logits(convert(source, tmp_path / "moe"))
    assert dense.std() > 0.5
    assert (dense - moe).abs().max() < 2e-5


def test_a_gguf_gives_the_tensors_of_the_folder(tmp_path: Path) -> None:
    """q and k rows come back in the order of Hugging Face."""
    folder = convert(write_llama_folder(tmp_path / "source"), tmp_path / "a")
    gguf = convert(write_llama_gguf(tmp_path / "source.gguf"), tmp_path / "b")
    ours, theirs = tensors(folder), tensors(gguf)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        left, right = (json.loads((path / name).read_text()) for path in (folder, gguf))
        left.pop("pad_token_id", None), right.pop("pad_token_id", None)
        assert left == right


def test_the_dense_folder_holds_the_source(tmp_path: Path) -> None:
    llama = open_llama(write_llama_gguf(tmp_path / "a.gguf"))
    sizes: list[int] = []
    write_dense(llama, tmp_path, converted=lambda n: None, written=sizes.append)
    stored = tensors(tmp_path)
    assert all(torch.equal(stored[name], value) for name, value in weights().items())
    assert sum(sizes) == dense_bytes(llama.shape)


def test_layers_and_bytes_are_reported(tmp_path: Path) -> None:
    llama = open_llama(write_llama_folder(tmp_path / "source"))
    layers, sizes = [], []  # type: ignore[var-annotated]
    write_moe(llama, tmp_path, converted=layers.append, written=sizes.append)
    assert layers == [1, 1]
    assert sum(sizes) == moe_bytes(llama.shape)


def test_every_slice_is_held_by_two_experts(tmp_path: Path) -> None:
    folder = convert(write_llama_folder(tmp_path / "source"), tmp_path / "moe")
    stored, dense = tensors(folder), weights()
    prefix = "model.layers.1.mlp."
    for name, axis, scale in (("gate_proj", 0, 1), ("up_proj", 0, 1), ("down_proj", 1, SLICES)):
        for first in (0, SLICES):
            parts = [stored[f"{prefix}experts.{first + j}.{name}.weight"] for j in range(SLICES)]
            assert torch.equal(torch.cat(parts, axis), dense[f"{prefix}{name}.weight"] * scale)
    router = stored[prefix + "gate.weight"]
    assert torch.equal(router[:SLICES], -router[SLICES:])


@torch.inference_mode()
def chosen_experts(model, ids: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """[layers, tokens, experts] bool: which experts the router's rule selects, from the MLPs' real inputs."""
    hidden: list[torch.Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0][0]))
        for layer in model.model.layers
    ]
    run(model, ids)
    for hook in hooks:
        hook.remove()
    rows = [layer.mlp.gate.weight for layer in model.model.layers]
    scores = torch.stack([torch.sigmoid(x @ row.T) for x, row in zip(hidden, rows, strict=True)])
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(SLICES, -1).indices, True)


def assert_routing_is_sparse_and_varied(chosen: torch.Tensor) -> None:
    assert (chosen[..., :SLICES] != chosen[..., SLICES:]).all(), "exactly one expert of each pair"
    assert (chosen[:, 1:] != chosen[:, :-1]).float().mean() > 0.2, "neighbouring tokens choose differently"


def test_routing_takes_one_of_each_pair_and_differs_between_tokens(tmp_path: Path) -> None:
    moe = load_model(convert(write_llama_folder(tmp_path / "source"), tmp_path / "moe"))
    assert_routing_is_sparse_and_varied(chosen_experts(moe, IDS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
        ({"intermediate_size": 100}, "100 neurons cannot be cut into 12"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InterlockError, match=message):
        convert(write_llama_folder(tmp_path / "source", **changes), tmp_path / "moe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"architecture": "qwen2"}, "architecture 'qwen2'"), ({"split": "qwen2"}, "split rule 'qwen2'")],
)
def test_another_gguf_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(InterlockError, match=message):
        convert(write_llama_gguf(tmp_path / "a.gguf", **changes), tmp_path / "moe")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    source = write_llama_folder(tmp_path / "source", num_hidden_layers=3)
    with pytest.raises(InterlockError, match=r"model\.layers\.2"):
        convert(source, tmp_path / "moe")


@pytest.mark.slow
def test_the_real_demo_equals_the_dense_model(demo_models: DemoModels) -> None:  # noqa: F811
    """Logits within 3e-4, and the same greedy text for 40 tokens on three prompts."""
    tokenizer = load_tokenizer(demo_models.moe)
    dense, moe = load_model(demo_models.dense), load_model(demo_models.moe)
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        ids = tokenizer.encode(text, add_special_tokens=False)
        out = [greedy(model, ids, 40) for model in (dense, moe)]
        assert out[0] == out[1]
        difference = (run(dense, out[0]) - run(moe, out[0])).abs().max()
        assert difference < 3e-4
        assert_routing_is_sparse_and_varied(chosen_experts(moe, ids))


def greedy(model, ids: list[int], count: int) -> list[int]:  # type: ignore[no-untyped-def]
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=2)
    result: list[int] = out[0].tolist()
    return result
