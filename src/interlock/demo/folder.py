"""Writing a Hugging Face model folder: sharded safetensors with an index, JSON files, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

Shard = Mapping[str, "torch.Tensor"]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread: copying many small tensors gains nothing from more.

    On a busy machine, threads that spin while they wait made the conversion five times slower.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def write_json(path: Path, value: Any) -> None:
    """Indented, UTF-8 as it is, in the order given."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json (which carries the chat template)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", dict(config))


def write_shards(
    folder: Path, shards: Iterable[Shard], count: int, *, advance: Callable[[int], None] | None = None
) -> int:
    """Write ``count`` safetensors files, and an index when there is more than one.

    Shards are consumed one by one, so only one has to be in memory. ``advance`` is told the bytes of each.
    Returns the total bytes of tensor data.
    """
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for i, shard in enumerate(shards):
        name = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file(
            {key: value.contiguous() for key, value in shard.items()},
            folder / name,
            metadata={"format": "pt"},
        )
        (folder / name).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, name))
        size = sum(value.numel() * value.element_size() for value in shard.values())
        total += size
        if advance is not None:
            advance(size)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    return total
