"""Writing and spoiling small safetensors folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


def copy_with(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """Copy a single-file checkpoint folder with its tensors changed in place by ``change``."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return target


def write_sharded(folder: Path, shards: dict[str, Tensors], weight_map: dict[str, str] | None = None) -> Path:
    """Write files and an index (of everything, unless given)."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder
