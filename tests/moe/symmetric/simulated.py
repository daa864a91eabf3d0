"""All ranks of an exchange in one thread: each stage runs for every rank before the next one begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlock.kernels.torch_reference import TorchKernels
from interlock.moe.a2a.backend import BufferShape
from interlock.moe.a2a.checked import ROW_DTYPES
from interlock.moe.a2a.rows import ContiguousRows, MaskedRows
from interlock.moe.a2a.symmetric.exchange import NOTICE_WORDS, Arrived, Exchange
from interlock.moe.a2a.symmetric.pulled import PulledExchange
from interlock.moe.a2a.symmetric.shape import RegionShape
from interlock.moe.a2a.symmetric.views import contiguous_rows, masked_rows
from interlock.moe.conformance.cases import Case, Setting
from interlock.moe.conformance.oracle import DTYPES
from interlock.moe.placement import place
from interlock.moe.terms import Layout, Phase

LOOKS = 3
"""How often a flag is looked at before its owner is late."""
WAITING = 6


def shape_of(setting: Setting) -> BufferShape:
    """What the planner would compute the buffers from."""
    width = setting.hidden_size
    return BufferShape(
        ranks=setting.ranks,
        num_experts=setting.num_experts,
        top_k=setting.top_k,
        hidden_size=width,
        row_bytes=width * ROW_DTYPES[setting.row_dtype].itemsize,
        scale_bytes=4 * -(-width // 128) if setting.row_dtype == "fp8" else 0,
        result_bytes=width * DTYPES[setting.dtype].itemsize,
        capacity=dict(setting.capacity),
        layouts=dict(setting.layouts),
        alignment=setting.alignment,
    )


@dataclass
class Simulated:
    """One exchange for each rank, over plain CPU memory full of NaN bits."""

    setting: Setting
    exchanges: list[Exchange]
    pulled: list[PulledExchange]
    kept: list[torch.Tensor]

    @staticmethod
    def of(setting: Setting) -> Simulated:
        shape = RegionShape.of(shape_of(setting))
        experts = place(setting.num_experts, setting.ranks)
        # Aligned as device memory is.
        raw = [torch.zeros(shape.region_bytes + 256, dtype=torch.uint8) for _ in experts]
        regions = [each[-each.data_ptr() % 256 :][: shape.region_bytes] for each in raw]
        for region in regions:
            names = ("weights", "scales", "rows", "results", "tokens", "token_scales", "result_slab")
            for name in (*names, "route_weights"):
                start = shape.offsets()[name]
                region[start : start + shape.sizes()[name]] = 0xFF
        addresses = [region.data_ptr() for region in regions]
        notices = [torch.zeros(NOTICE_WORDS, dtype=torch.int64) for _ in experts]
        exchanges = [
            Exchange(shape, experts, rank, regions[rank], addresses, notices[rank], LOOKS)
            for rank in range(setting.ranks)
        ]
        return Simulated(setting, exchanges, [PulledExchange(each, WAITING) for each in exchanges], raw)

    def dispatch(self, case: Case, phase: Phase) -> list[tuple[MaskedRows | ContiguousRows, Arrived]]:
        """What every rank received."""
        setting = self.setting
        masked = dict(setting.layouts)[phase] is Layout.MASKED
        slab_rows = setting.ranks * dict(setting.capacity)[phase] if masked else 0
        if masked and self.few(phase):
            return self._dispatch_few(case, slab_rows)
        for rank, exchange in enumerate(self.exchanges):
            exchange.exchange_counts(case.ids[rank], slab_rows, setting.alignment, waits=False)
        arrived = [
            exchange.exchange_counts(case.ids[rank], slab_rows, setting.alignment, sends=False)
            for rank, exchange in enumerate(self.exchanges)
        ]
        for rank, exchange in enumerate(self.exchanges):
            exchange.send_rows(case.hidden[rank], case.scales[rank], case.weights[rank], waits=False)
        for exchange in self.exchanges:
            exchange.await_stage(1)
        dtype = ROW_DTYPES[setting.row_dtype]
        received: list[tuple[MaskedRows | ContiguousRows, Arrived]] = []
        for exchange, here in zip(self.exchanges, arrived, strict=True):
            total = int(exchange.notice[4])
            rows: MaskedRows | ContiguousRows = (
                masked_rows(exchange, here, slab_rows, dtype)
                if masked
                else contiguous_rows(exchange, here, total, setting.alignment, dtype)
            )
            received.append((rows, here))
        return received

    def few(self, phase: Phase) -> bool:
        return self.exchanges[0].shape.is_few(dict(self.setting.capacity)[phase])

    def _dispatch_few(self, case: Case, slab_rows: int) -> list[tuple[MaskedRows | ContiguousRows, Arrived]]:
        arrived: list[Arrived] = []
        for publishes in (True, False):
            arrived = [
                each.dispatch(
                    case.hidden[rank], case.scales[rank], case.ids[rank], case.weights[rank], slab_rows,
                    publishes=publishes, takes=not publishes,
                )
                for rank, each in enumerate(self.pulled)
            ]  # fmt: skip
        dtype = ROW_DTYPES[self.setting.row_dtype]
        return [
            (
                masked_rows(
                    each, here, slab_rows, dtype, pulled.result_slab.view(DTYPES[self.setting.dtype])
                ),
                here,
            )
            for each, pulled, here in zip(self.exchanges, self.pulled, arrived, strict=True)
        ]

    def _combine_few(
        self, case: Case, results: list[torch.Tensor], arrived: list[Arrived]
    ) -> list[torch.Tensor]:
        """Sums are rounded here: Triton's interpreter cuts bfloat16 off."""
        combined: list[torch.Tensor] = []
        for signals in (True, False):
            combined = [
                each.combine(
                    rows.flatten(0, 1), case.ids[rank], here, rows.shape[1], torch.float32,
                    signals=signals, takes=not signals,
                ).to(DTYPES[self.setting.dtype])
                for rank, (each, rows, here) in enumerate(zip(self.pulled, results, arrived, strict=True))
            ]  # fmt: skip
        return combined

    def combine(self, case: Case, results: list[torch.Tensor], arrived: list[Arrived]) -> list[torch.Tensor]:
        """Every rank's tokens."""
        dtype = DTYPES[self.setting.dtype]
        width = self.setting.hidden_size
        if results[0].dim() == 3 and self.few(case.phase):
            return self._combine_few(case, results, arrived)
        for exchange, rows, here in zip(self.exchanges, results, arrived, strict=True):
            exchange.return_rows(rows.reshape(-1, width), here, waits=False)
        for exchange in self.exchanges:
            exchange.await_stage(2)
        combined = []
        for rank, exchange in enumerate(self.exchanges):
            lanes = exchange.results.view(dtype).view(-1, self.setting.top_k, width)
            tokens = case.ids[rank].shape[0]
            combined.append(TorchKernels().sum_lanes(lanes[:tokens], case.ids[rank], dtype))
        return combined

    def problems(self) -> list[list[int]]:
        """Notices that are not empty."""
        return [exchange.notice.tolist() for exchange in self.exchanges if int(exchange.notice[0])]
