"""Which safetensors files of a folder hold which tensors, from file headers alone. No torch here.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes of
JSON ``{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}``, then the data.
Everything a header says is checked against the size of the file before any buffer is made from it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlock.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 256_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: ``dtype`` in the file's notation, ``offset`` in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FolderIndex:
    """All tensors of a checkpoint folder by name.

    Attributes:
        unlisted: names that a listed file holds but the index does not list (reported, never read).
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    unlisted: tuple[str, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file.

    Raises:
        CheckpointError: missing, truncated, padded or malformed; says the file, what it should hold and what
            it does.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start[:8] == b"version ":
            raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull`")
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: not a complete safetensors file: it has {size} bytes and its header claims {length}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__} instead of an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed safetensors header: {error}") from None
    header.pop("__metadata__", None)
    entries = [_entry(path, name, value) for name, value in header.items()]
    _check_extents(path, entries, size - 8 - length)
    return {
        entry.name: StoredTensor(entry.name, entry.dtype, entry.shape, path, entry.offset + 8 + length)
        for entry in entries
    }


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return dict(pairs)


def _entry(path: Path, name: str, value: Any) -> StoredTensor:
    """One header entry with a relative offset; shape and byte range must agree."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
        valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{path}: malformed safetensors header entry for {name!r}")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} needs {expected} bytes, "
            f"its range has {end - begin}"
        )
    return StoredTensor(name, dtype, shape, path, begin)


def _check_extents(path: Path, entries: list[StoredTensor], data_bytes: int) -> None:
    """Byte ranges must tile the data without gap or overlap and end where the file ends."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.offset} of the data; "
                f"expected {position} (gap or overlap)"
            )
        position += entry.nbytes
    if position != data_bytes:
        kind = "truncated" if data_bytes < position else "padded"
        raise CheckpointError(
            f"{path}: {kind}: its tensors need {position} bytes of data, the file has {data_bytes}"
        )


def read_folder(folder: str | Path) -> FolderIndex:
    """Tensors of a folder: by its index when there is one, else of its single file.

    Raises:
        CheckpointError: no usable file, a file of the index is missing or outside the folder, a tensor is not
            in the file the index names, or the same tensor is in two files. Collects everything it finds.
    """
    folder = Path(folder)
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _by_index(folder, _read_weight_map(index_path))
    path = folder / SINGLE_NAME
    if not path.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: no {SINGLE_NAME}, no {INDEX_NAME}; only safetensors are read")
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            raise CheckpointError(
                f"{folder}: several safetensors files ({names}) and no {INDEX_NAME} that says which belong "
                "together"
            )
        path = files[0]
    return FolderIndex(folder, read_header(path), ())


def _read_weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes is too large for an index")
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        weight_map = index["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed index: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is empty or no object")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or "\\" in file
            or not file.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to be in {file!r}; only the plain name of a "
                ".safetensors file in the same folder is accepted"
            )
    return weight_map


def _by_index(folder: Path, weight_map: dict[str, str]) -> FolderIndex:
    problems: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    unlisted: set[str] = set()
    seen: dict[str, str] = {}
    for file in sorted(set(weight_map.values())):
        try:
            header = read_header(folder / file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name, stored in header.items():
            if name in seen:
                problems.append(f"tensor {name!r} is in two files: {seen[name]} and {file}")
            seen[name] = file
            if weight_map.get(name) == file:
                tensors[name] = stored
            elif name not in weight_map:
                unlisted.add(name)
        absent = [name for name, where in weight_map.items() if where == file and name not in header]
        problems += [f"tensor {name!r} is not in {file}, where the index puts it" for name in absent]
    raise_problems(folder, problems)
    return FolderIndex(folder, tensors, tuple(sorted(unlisted)))


def raise_problems(folder: Path, problems: list[str], shown: int = 10) -> None:
    """Raise one CheckpointError with the first problems and their number, if there are any."""
    if not problems:
        return
    lines = [f"{folder}: {len(problems)} problem{'s' if len(problems) > 1 else ''} with the checkpoint"]
    lines += [f"  {problem}" for problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"  ... and {len(problems) - shown} more")
    raise CheckpointError("\n".join(lines))
