"""Tiny random checkpoints: a second to make, every feature of the real ones, for tests and offline use."""

from __future__ import annotations

from pathlib import Path

import torch

from interlock.demo.folder import one_torch_thread, write_json, write_shards, write_tokenizer
from interlock.demo.tiny_config import tiny_config, tiny_generation_config
from interlock.demo.tiny_spec import TinySpec
from interlock.demo.tiny_tokenizer import tiny_tokenizer, tiny_tokenizer_config
from interlock.demo.tiny_weights import TinyWeights, tiny_weights

__all__ = ["TinySpec", "TinyWeights", "tiny_weights", "write_tiny", "write_tiny_reference"]


def write_tiny(folder: Path | str, spec: TinySpec | None = None) -> Path:
    """Write a complete model folder for a spec (default: the built-in model ``tiny-random``); returns it."""
    spec = spec or TinySpec()
    with one_torch_thread():
        return _write(Path(folder), spec, tiny_weights(spec).stored)


def write_tiny_reference(folder: Path | str, spec: TinySpec | None = None) -> Path:
    """Write the plain twin of ``write_tiny(folder, spec)``: the same values in float32, q/k/v split.

    For MiMo-V2 this is the MiMo-V2-Flash form that transformers reads. Its class attends to one key more
    than the window says, so compare with ``sliding_window_extra`` 1.
    """
    spec = spec or TinySpec()
    plain = spec.replace(qkv="split", fp8=False, dtype="float32")
    with one_torch_thread():
        return _write(Path(folder), plain, tiny_weights(spec).reference)


def _write(folder: Path, spec: TinySpec, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    size = -(-len(names) // spec.shards)
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    write_shards(folder, ({name: tensors[name] for name in group} for group in groups), len(groups))
    write_json(folder / "config.json", tiny_config(spec))
    write_json(folder / "generation_config.json", tiny_generation_config())
    write_tokenizer(folder, tiny_tokenizer(spec.vocab_size), tiny_tokenizer_config(spec.max_position))
    return folder
