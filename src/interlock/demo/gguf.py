"""A reader for GGUF files (versions 2 and 3): metadata, and tensors dequantised to float32.

Only what the demo needs, so that no further package has to be installed. Layout as documented by ggml:
magic, version, counts, key/value pairs, tensor descriptions, then aligned data. Every size is checked against
the file before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from interlock.errors import InterlockError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK = 32
_MAX_DIMENSIONS = 4


def _half(blocks: Bytes, start: int) -> Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_1(blocks: Bytes) -> Floats:
    nibbles = np.concatenate([blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4], axis=1)
    return _half(blocks, 0) * nibbles.astype(np.float32) + _half(blocks, 2)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    block_values: int
    block_bytes: int
    dequantise: Callable[[Bytes], Floats]


_FORMATS = {
    0: _Format("F32", 1, 4, _f32),
    1: _Format("F16", 1, 2, _f16),
    3: _Format("Q4_1", _BLOCK, 20, _q4_1),
    8: _Format("Q8_0", _BLOCK, 34, _q8_0),
    30: _Format("BF16", 1, 2, _bf16),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is. ``shape`` is row-major (GGUF's order reversed); ``offset`` counts from byte 0."""

    shape: tuple[int, ...]
    format: _Format
    offset: int
    size: int


class GgufFile:
    """An open GGUF file; the data stays on disk until it is read.

    Attributes:
        metadata: all key/value pairs, arrays as lists.
        tensors: tensor descriptions by name.

    Raises:
        InterlockError: no GGUF file, cut short, or a tensor format other than F32, F16, BF16, Q8_0, Q4_1.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if not file.read(1):
                raise InterlockError(f"{path} is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise InterlockError(f"{path} is a damaged GGUF file: {error} at byte {self._at}") from None

    def read(self, name: str) -> Floats:
        """A tensor as float32 in its row-major shape.

        Raises:
            InterlockError: there is no such tensor.
        """
        if name not in self.tensors:
            raise InterlockError(f"{self.path} has no tensor {name}")
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.size, tensor.offset)
        values = tensor.format.dequantise(raw.reshape(-1, tensor.format.block_bytes))
        return values.reshape(tensor.shape)

    def _read_header(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise InterlockError(f"{self.path} is no GGUF file: it begins with {magic!r}")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise InterlockError(f"{self.path} has GGUF version {version}; 2 and 3 can be read")
        tensor_count, pair_count = self._count(), self._count()
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        described = [self._describe() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise struct.error(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {
            name: self._place(name, start, shape, kind, offset) for name, shape, kind, offset in described
        }

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self._string(), self._scalar("I")
        if count > _MAX_DIMENSIONS:
            raise struct.error(f"tensor {name!r} has {count} dimensions")
        dimensions = tuple(self._scalar("Q") for _ in range(count))
        return name, dimensions[::-1], self._scalar("I"), self._scalar("Q")

    def _place(self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in _FORMATS:
            known = ", ".join(fmt.name for fmt in _FORMATS.values())
            raise InterlockError(f"{self.path}: tensor {name} has format number {kind}; {known} can be read")
        fmt = _FORMATS[kind]
        values = 1
        for dimension in shape:
            values *= dimension
        size = values // fmt.block_values * fmt.block_bytes
        if (shape and shape[-1] % fmt.block_values) or start + offset + size > len(self._data):
            raise InterlockError(
                f"{self.path} is damaged or cut short: tensor {name} {shape} in {fmt.name} would end at byte "
                f"{start + offset + size} of {len(self._data)}"
            )
        return GgufTensor(shape, fmt, start + offset, size)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _count(self) -> int:
        """A number of things that take a byte or more each."""
        count: int = self._scalar("Q")
        if count > len(self._data) - self._at:
            raise struct.error(f"{count} entries announced, {len(self._data) - self._at} bytes left")
        return count

    def _string(self) -> str:
        length = self._count()
        text = self._data[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        inner = self._scalar("I")
        count = self._count()
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            values = struct.unpack_from(code, self._data, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        if inner != _STRING:
            raise struct.error(f"an array of type {inner}")
        return [self._string() for _ in range(count)]
