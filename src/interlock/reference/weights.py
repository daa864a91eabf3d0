"""Plain weights of a checkpoint folder for the references: all in memory, fp8 blocks multiplied out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SCALE_SUFFIX = "_scale_inv"


def read_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(config.json, tensors as stored) of a small checkpoint; with an index, only of the files it names."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(folder / file))
    return config, tensors


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an fp8 block; 128 x 128 where the config does not say."""
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size", (128, 128))
    return rows, columns


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """e4m3 [n, K] times the float32 scale of its block, scale[r // bn, c // bk] -> float32."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale.float()[rows][:, columns]


def plain_weights(
    config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], *, chunked_qkv: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """float32 weights without scales.

    ``chunked_qkv``: for each fused tensor that is stored in chunks, how many; their scale grids restart in
    each chunk. Their rows stay in stored order.
    """
    plain = {}
    block = block_size(config)
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scale = stored.get(name + SCALE_SUFFIX)
        if scale is None:
            plain[name] = tensor.float()
            continue
        chunks = chunked_qkv.get(name, 1)
        # float8 tensors cannot be cut or joined by every torch version: work on the bytes
        pieces = [piece.view(tensor.dtype) for piece in tensor.view(torch.uint8).chunk(chunks)]
        grids = scale.chunk(chunks)
        plain[name] = torch.cat(
            [dequantise(piece, grid, block) for piece, grid in zip(pieces, grids, strict=True)]
        )
    return plain
