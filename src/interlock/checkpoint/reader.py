"""Reading tensors of a checkpoint folder piece by piece: only the rows a rank needs, dequantised.

Files are read with plain reads rather than mapped: mapped pages stay in the process's resident memory, so a
load would peak at file size + weights. Here the peak is the weights plus one band of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import torch

from interlock.checkpoint.fp8 import dequantise, scale_row_of
from interlock.checkpoint.fp8_names import SCALE_SUFFIX
from interlock.checkpoint.index import StoredTensor, read_folder
from interlock.checkpoint.source import Progress, no_progress
from interlock.checkpoint.specs import TensorSpec
from interlock.checkpoint.validate import LoadReport, validate
from interlock.errors import CheckpointError
from interlock.kernels.fp8_blocks import BLOCK, Fp8Blocks
from interlock.plan.card import ModelCard

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
BAND_BYTES = 32 << 20
"""Bytes of float32 values that are converted at once."""


class Checkpoint:
    """The tensors of one folder. A context manager: leaving it closes the files.

    Args:
        folder: safetensors files, with an index or a single one.
        card: what config.json says.
        qkv_layout: "auto", "plain" or "chunked", for a fused qkv tensor.
        progress: called after each layer.

    Raises:
        CheckpointError: the folder or a header cannot be used.
    """

    load_format = "safetensors"

    def __init__(
        self,
        folder: str | Path,
        card: ModelCard,
        *,
        qkv_layout: str = "auto",
        progress: Progress = no_progress,
    ) -> None:
        self.folder = Path(folder)
        self._index = read_folder(folder)
        self._card = card
        self._qkv_layout = qkv_layout
        self._specs: dict[str, TensorSpec] = {}
        self._files: dict[Path, FileIO] = {}
        self.progress = progress
        self.report = LoadReport()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def validate(self, specs: Sequence[TensorSpec], skipped_prefixes: Sequence[str]) -> LoadReport:
        self.report = validate(
            self._index,
            specs,
            card=self._card,
            skipped_prefixes=skipped_prefixes,
            qkv_layout=self._qkv_layout,
        )
        self._specs = {spec.name: spec for spec in specs}
        return self.report

    def __contains__(self, name: str) -> bool:
        return name in self._index.tensors

    def location(self, name: str) -> StoredTensor:
        """Where the tensor lies."""
        return self._index.tensors[name]

    def read(
        self,
        name: str,
        *,
        rows: Sequence[range] | None = None,
        columns: range | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        stored = self._index.tensors[name]
        runs = [range(stored.shape[0])] if rows is None else rows
        if columns is None and TORCH_DTYPES[stored.dtype] is dtype:
            return self._read_runs(stored, runs)
        if len(stored.shape) == 1:
            return self._read_runs(stored, runs).to(dtype)
        width = slice(None) if columns is None else slice(columns.start, columns.stop)
        out_columns = stored.shape[1] if columns is None else len(columns)
        out = torch.empty(sum(map(len, runs)), out_columns, dtype=dtype)
        scale = self._read_scale(stored)
        done = 0
        for band in bands(runs, stored.shape[1]):
            values = self._read_runs(stored, [band])
            if scale is not None:
                grid_rows = self._scale_rows(stored, band)
                values = dequantise(values, scale[grid_rows], self._card.weight_block[1])
            out[done : done + len(band)] = values[:, width]
            done += len(band)
        return out

    def is_fp8(self, name: str) -> bool:
        return self._index.tensors[name].dtype == "F8_E4M3"

    def read_fp8(
        self, name: str, *, rows: Sequence[range] | None = None, columns: range | None = None
    ) -> Fp8Blocks:
        stored = self._index.tensors[name]
        runs = [range(stored.shape[0])] if rows is None else rows
        scale = self._read_scale(stored)
        if scale is None or self._card.weight_block != (BLOCK, BLOCK):
            raise CheckpointError(f"tensor {name!r} is not stored as fp8 in blocks of {BLOCK}x{BLOCK}")
        grid_rows = torch.cat([self._scale_rows(stored, run) for run in runs])
        padding = -len(grid_rows) % BLOCK
        blocks = torch.cat([grid_rows, grid_rows[-1:].expand(padding)]).view(-1, BLOCK)
        whole_columns = columns is None or columns.start % BLOCK == 0
        if not bool((blocks == blocks[:, :1]).all()) or not whole_columns:
            raise CheckpointError(
                f"tensor {name!r}: the rows and columns that this rank needs do not fall on blocks of "
                f"{BLOCK}; --quantization none dequantises them"
            )
        values, grid = self._read_runs(stored, runs), scale[blocks[:, 0]]
        if columns is not None:
            values = values.view(torch.uint8)[:, columns.start : columns.stop].view(values.dtype)
            grid = grid[:, columns.start // BLOCK : -(-columns.stop // BLOCK)]
        return Fp8Blocks(values.contiguous(), grid.contiguous())

    def expert_fill(self, prefix: str, first_expert: int) -> None:
        return None

    def _read_scale(self, stored: StoredTensor) -> torch.Tensor | None:
        if stored.dtype != "F8_E4M3":
            return None
        scale = self._index.tensors[stored.name + SCALE_SUFFIX]
        values = self._read_runs(scale, [range(scale.shape[0])]).to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{scale.path}: scale {scale.name!r} holds values that are not finite")
        return values

    def _scale_rows(self, stored: StoredTensor, band: range) -> torch.Tensor:
        chunks = self._specs[stored.name].fused_groups if self.report.qkv_layout == "chunked" else 0
        return scale_row_of(
            torch.arange(band.start, band.stop),
            rows=stored.shape[0],
            block_rows=self._card.weight_block[0],
            chunks=chunks or 1,
        )

    def _read_runs(self, stored: StoredTensor, runs: Sequence[range]) -> torch.Tensor:
        """Rows as stored, one read for each run, without a copy."""
        count = sum(map(len, runs))
        raw = torch.empty(count * stored.row_bytes, dtype=torch.uint8)
        view = raw.numpy().data
        done = 0
        for run in runs:
            self._fill(view[done : done + len(run) * stored.row_bytes], stored, run.start)
            done += len(run) * stored.row_bytes
        return raw.view(TORCH_DTYPES[stored.dtype]).view(count, *stored.shape[1:])

    def _fill(self, view: memoryview, stored: StoredTensor, first_row: int) -> None:
        """Read ``len(view)`` bytes from the start of a row on."""
        file = self._files.get(stored.path)
        if file is None:
            file = self._files.setdefault(stored.path, stored.path.open("rb", buffering=0))
        file.seek(stored.offset + first_row * stored.row_bytes)
        filled = 0
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise CheckpointError(f"{stored.path}: ended while {stored.name!r} was read; did it change?")
            filled += count


def bands(runs: Sequence[range], columns: int) -> list[range]:
    """The runs cut into pieces of at most ``BAND_BYTES`` of float32 values."""
    limit = max(1, BAND_BYTES // (4 * max(1, columns)))
    return [
        range(start, min(start + limit, run.stop))
        for run in runs
        for start in range(run.start, run.stop, limit)
    ]
