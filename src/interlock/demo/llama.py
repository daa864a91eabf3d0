"""A dense Llama checkpoint, from a GGUF file or a Hugging Face folder, one float32 tensor at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from interlock.demo.folder import write_tokenizer
from interlock.demo.gguf import GgufFile
from interlock.demo.gguf_tokenizer import gguf_tokenizer, gguf_tokenizer_config
from interlock.errors import InterlockError

if TYPE_CHECKING:
    import torch

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes and constants of a dense Llama with tied embeddings and no biases."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_position: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


class LlamaSource(Protocol):
    """What a conversion reads."""

    shape: LlamaShape

    def tensor(self, name: str) -> torch.Tensor:
        """A float32 tensor by its Hugging Face name, without ".weight"."""
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        ...


class GgufLlama:
    """A Llama in a GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        try:
            self.shape = _gguf_shape(self._file.metadata)
        except KeyError as error:
            raise InterlockError(f"{path} lacks the metadata {error}; a Llama GGUF file has it") from None
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise InterlockError(f"{path} has metadata that no Llama has: {error}") from None
        if "output.weight" in self._file.tensors or "rope_freqs.weight" in self._file.tensors:
            raise InterlockError(
                f"{path}: a Llama with an own output matrix or scaled rotary is not supported"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """A float32 tensor by its Hugging Face name, without ".weight"."""
        import torch

        parts = name.split(".")
        if parts[1] == "layers":
            values = self._file.read(f"blk.{parts[2]}.{_GGUF_NAMES['.'.join(parts[3:])]}.weight")
        else:
            values = self._file.read(f"{_GGUF_NAMES[name]}.weight")
        tensor = torch.from_numpy(values.copy())
        if parts[-1] in ("q_proj", "k_proj"):
            heads = self.shape.num_heads if parts[-1] == "q_proj" else self.shape.num_kv_heads
            return _rotary_halves(tensor, heads)
        return tensor

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, rebuilt from the vocabulary in the file."""
        metadata = self._file.metadata
        write_tokenizer(folder, gguf_tokenizer(metadata), gguf_tokenizer_config(metadata))


class FolderLlama:
    """A Llama in a Hugging Face folder with one safetensors file."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self.shape = _config_shape(config)
            self._file: Any = safe_open(folder / "model.safetensors", framework="pt")
        except KeyError as error:
            raise InterlockError(f"{folder}/config.json lacks {error}; a LlamaForCausalLM has it") from None
        except (OSError, ValueError, SafetensorError) as error:
            raise InterlockError(f"{folder} cannot be read as a Llama checkpoint: {error}") from None

    def tensor(self, name: str) -> torch.Tensor:
        """A float32 tensor by its Hugging Face name, without ".weight"."""
        from safetensors import SafetensorError

        try:
            tensor: torch.Tensor = self._file.get_tensor(name + ".weight")
        except SafetensorError as error:
            raise InterlockError(f"{self._folder}/model.safetensors: {error}") from None
        return tensor.float()

    def write_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer files."""
        for name in _TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def open_llama(path: Path) -> LlamaSource:
    """A .gguf file or a Hugging Face folder."""
    return FolderLlama(path) if path.is_dir() else GgufLlama(path)


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp puts the two rows of a rotary pair side by side; Hugging Face half a head apart."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _gguf_shape(metadata: dict[str, Any]) -> LlamaShape:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise InterlockError(
            f"the GGUF file holds the architecture {architecture!r}; the demo is made from a llama"
        )

    def value(name: str) -> Any:
        return metadata[f"llama.{name}"]

    hidden, heads = value("embedding_length"), value("attention.head_count")
    eos = metadata["tokenizer.ggml.eos_token_id"]
    return LlamaShape(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length"),
        layers=value("block_count"),
        num_heads=heads,
        num_kv_heads=value("attention.head_count_kv"),
        head_dim=hidden // heads,
        rope_theta=float(value("rope.freq_base")),
        norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        max_position=value("context_length"),
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=eos,
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id", eos),
    )


def _config_shape(config: dict[str, Any]) -> LlamaShape:
    rope = config.get("rope_parameters") or {}
    unsupported = {
        "model_type": config["model_type"] != "llama",
        "tie_word_embeddings": not config.get("tie_word_embeddings", False),
        "hidden_act": config["hidden_act"] != "silu",
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "rope_scaling": config.get("rope_scaling") or rope.get("rope_type", "default") != "default",
    }
    for name, wrong in unsupported.items():
        if wrong:
            raise InterlockError(
                f"config.json: {name} is {config.get(name)!r}; the demo is made from a Llama with silu, tied "
                "embeddings, no biases and plain rotary"
            )
    heads = config["num_attention_heads"]
    eos = config["eos_token_id"]
    return LlamaShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        max_position=config["max_position_embeddings"],
        bos_token_id=config["bos_token_id"],
        eos_token_id=eos,
        pad_token_id=eos if config.get("pad_token_id") is None else config["pad_token_id"],
    )
