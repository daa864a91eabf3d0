"""The inputs of captured decode steps: tensors that stay where they are, filled anew for each replay.

Legend: B sequences of the largest bucket, b of a smaller one, n live sequences (one token each), P pages in a
page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from interlock.engine.batch import Int32s, Int64s, StepArrays
from interlock.moe.terms import Phase
from interlock.step import PageMap, Step

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Space:
    """Which page spaces the model has."""

    full: bool
    window: bool


class StepBuffers:
    """Device tensors of a decode step of up to ``size`` sequences, and two pinned images of them in turn.

    A replay's copy reads one image while the next step is written to the other; the step before the last has
    been waited for by then.
    """

    def __init__(self, size: int, pages: int, space: Space, device: torch.device) -> None:
        fields = [("token_ids", torch.int64, size), ("positions", torch.int64, size)]
        fields += [(f"{name}_slots", torch.int64, size) for name in _names(space)]
        fields += [("query_start", torch.int32, size + 1), ("kv_len", torch.int32, size)]
        fields += [("live_count", torch.int32, 1)]
        self._size, self._space = size, space
        self._device = _Image(fields, device)
        self._hosts = (_Image(fields, None), _Image(fields, None))
        self._tables = {
            name: torch.full((size, pages), -1, dtype=torch.int32, device=device) for name in _names(space)
        }
        self._host_tables = tuple(
            {name: _pinned(torch.full((size, pages), -1, dtype=torch.int32)) for name in _names(space)}
            for _ in range(2)
        )
        self._sent: dict[str, Int32s] = {}
        self._turn = 0
        self._rows = torch.arange(size, device=device)

    def step(self, bucket: int) -> Step:
        """The step of ``bucket`` sequences whose tensors are these buffers."""
        views = self._device.views

        def page_map(name: str) -> PageMap:
            return PageMap(table=self._tables[name][:bucket], slots=views[f"{name}_slots"][:bucket])

        return Step(
            phase=Phase.DECODE,
            token_ids=views["token_ids"][:bucket],
            positions=views["positions"][:bucket],
            query_start=views["query_start"][: bucket + 1],
            kv_len=views["kv_len"][:bucket],
            full=page_map("full") if self._space.full else None,
            window=page_map("window") if self._space.window else None,
            sample_rows=self._rows[:bucket],
            live_tokens=bucket,
            live_count=views["live_count"],
        )

    def fill(self, arrays: StepArrays, tokens: torch.Tensor | None) -> None:
        """Queue the copy of a step of n sequences, padding behind them.

        Args:
            tokens: int64 [n] on the device, in place of ``arrays.token_ids``.
        """
        count = len(arrays.kv_len)
        self._turn ^= 1
        image = self._hosts[self._turn]
        image.put("token_ids", arrays.token_ids, 0)
        image.put("positions", arrays.positions, 0)
        image.put("query_start", arrays.query_start, count)
        image.put("kv_len", arrays.kv_len, 0)
        image.put("live_count", np.array([count], dtype=np.int32), 0)
        for name, slots, table in (
            ("full", arrays.full_slots, arrays.full_table),
            ("window", arrays.window_slots, arrays.window_table),
        ):
            if slots is not None and table is not None:
                image.put(f"{name}_slots", slots, -1)
                self._send_table(name, table)
        self._device.bytes.copy_(image.bytes, non_blocking=True)
        if tokens is not None:
            self._device.views["token_ids"][:count].copy_(tokens)

    def _send_table(self, name: str, table: Int32s) -> None:
        """Copy a page table [n, used pages] where it differs from what the device has."""
        sent = self._sent.get(name)
        if sent is not None and sent.shape == table.shape and np.array_equal(sent, table):
            return
        self._sent[name] = table
        count, used = table.shape
        host = self._host_tables[self._turn][name]
        host.numpy()[:count, :used] = table
        self._tables[name][:count].copy_(host[:count], non_blocking=True)


class _Image:
    """One block of bytes and the fields in it; pinned on the host where ``device`` is None."""

    def __init__(self, fields: list[tuple[str, torch.dtype, int]], device: torch.device | None) -> None:
        starts, end = {}, 0
        for name, dtype, count in fields:
            starts[name] = end
            end += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        block = torch.zeros(end, dtype=torch.uint8, device=device or "cpu")
        self.bytes = block if device is not None else _pinned(block)
        self.views = {
            name: self.bytes[starts[name] : starts[name] + count * dtype.itemsize].view(dtype)
            for name, dtype, count in fields
        }
        self._arrays = {name: view.numpy() for name, view in self.views.items()} if device is None else {}

    def put(self, name: str, values: Int32s | Int64s, padding: int) -> None:
        """Write a host field, ``padding`` behind the values."""
        field = self._arrays[name]
        field[: len(values)] = values
        field[len(values) :] = padding


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _names(space: Space) -> list[str]:
    return [name for name, held in (("full", space.full), ("window", space.window)) if held]
