"""GGUF files through the ``gguf`` package, with its many ways to fail on damage turned into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from interlock.errors import InterlockError

Floats = npt.NDArray[np.float32]

_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, OSError)
_SYNTHETIC = "GGUF."
"""Prefix of the fields that the reader adds for the file header."""


class GgufFile:
    """An open GGUF file; the data stays on disk until it is read.

    Attributes:
        metadata: all key/value pairs, arrays as lists.
        tensors: descriptions by name.

    Raises:
        InterlockError: no GGUF file, damaged, or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = gguf.GGUFReader(str(path))
            self.metadata: dict[str, Any] = {
                name: field.contents()
                for name, field in reader.fields.items()
                if not name.startswith(_SYNTHETIC)
            }
        except _DAMAGE as error:
            raise InterlockError(f"{path} is no GGUF file, or a damaged one: {error}") from None
        self.tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def read(self, name: str) -> Floats:
        """A tensor as float32 in its row-major shape.

        Raises:
            InterlockError: there is no such tensor, or its format cannot be read.
        """
        if name not in self.tensors:
            raise InterlockError(f"{self.path} has no tensor {name}")
        tensor = self.tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except (NotImplementedError, *_DAMAGE) as error:
            raise InterlockError(f"{self.path}: tensor {name} cannot be read: {error}") from None
