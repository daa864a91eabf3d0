"""The contract's checks, once, for every dispatcher: subclass ``CheckedDispatcher`` and write the exchange.

What it guarantees: nothing is sent when a check fails; a second dispatch before combine is an error; a
handle works once, only with the dispatcher that made it, and is released on every path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from interlock.moe.a2a.backend import A2ABackend, BufferShape, routing_problem
from interlock.moe.a2a.contract import ContractError, Dispatched, DispatcherReceipt, DispatcherSpec, Handle
from interlock.moe.a2a.rows import SCALE_GROUP, ContiguousRows, ExpertInput, MaskedRows
from interlock.moe.routing import validate_routes
from interlock.moe.terms import Phase

ROW_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def buffer_shape(spec: DispatcherSpec) -> BufferShape:
    """The sizes of ``spec`` as the declarations' memory formulas take them."""
    quantised = spec.row_dtype == "fp8"
    return BufferShape(
        ranks=len(spec.experts),
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        hidden_size=spec.hidden_size,
        row_bytes=spec.hidden_size * ROW_DTYPES[spec.row_dtype].itemsize,
        scale_bytes=4 * -(-spec.hidden_size // SCALE_GROUP) if quantised else 0,
        result_bytes=spec.hidden_size * spec.dtype.itemsize,
        capacity=spec.capacity,
        layouts=spec.layouts,
        alignment=spec.alignment,
        nodes=spec.nodes,
        mode=spec.mode,
    )


class CheckedDispatcher(ABC):
    """A ``Dispatcher`` whose subclasses implement ``_dispatch`` and ``_combine`` on checked arguments.

    Args:
        spec: what to build.
        declaration: of the backend; a spec outside its capabilities is refused.
    """

    def __init__(self, spec: DispatcherSpec, declaration: A2ABackend) -> None:
        _check_spec(spec, declaration)
        self.spec = spec
        self.declaration = declaration
        self.buffer_bytes = 0
        self._pending: Handle | None = None
        self._layouts_seen: dict[str, str] = {}
        self._peak_bytes = 0
        self._dispatches = 0
        self._combines = 0
        self._closed = False

    @abstractmethod
    def _dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> tuple[ExpertInput, Any]:
        """Exchange; returns the rows of this rank's experts and the state that ``_combine`` needs."""

    @abstractmethod
    def _combine(self, rows: torch.Tensor, num_tokens: int, state: Any) -> torch.Tensor:
        """Bring the results home: [num_tokens, h]."""

    def dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        *,
        scales: torch.Tensor | None = None,
    ) -> Dispatched:
        """See ``Dispatcher.dispatch``."""
        self._check_dispatch(hidden, ids, weights, phase, scales)
        handle = Handle(num_tokens=hidden.shape[0], phase=phase, state=None)
        self._pending = handle
        try:
            rows, handle.state = self._dispatch(hidden, ids, weights, phase, scales)
            self._check_weights(rows)
        except BaseException:
            self.release(handle)
            raise
        self._layouts_seen[phase.value] = rows.layout.value
        self._peak_bytes = max(self._peak_bytes, _bytes_of(rows))
        self._dispatches += 1
        return Dispatched(rows=rows, handle=handle)

    def combine(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """See ``Dispatcher.combine``."""
        if handle.released:
            raise ContractError("combine was given a handle that was combined or released already")
        if handle is not self._pending:
            raise ContractError("combine was given a handle of another dispatcher")
        try:
            if rows.dtype not in self._result_dtypes(rows):
                raise ContractError(f"results are {rows.dtype}, this dispatcher carries {self.spec.dtype}")
            combined = self._combine(rows, handle.num_tokens, handle.state)
            self._combines += 1
            return combined
        finally:
            self.release(handle)

    def _check_weights(self, rows: ExpertInput) -> None:
        """Routing weights are applied once: by the runner, unless the declaration says that combine does."""
        if (rows.weights is None) != self.declaration.applies_weights:
            said = "applies_weights" if self.declaration.applies_weights else "that runners apply weights"
            carried = "without" if rows.weights is None else "with"
            name = self.declaration.name
            raise ContractError(f"{name} declares {said} and dispatched rows {carried} weights")

    def _result_dtypes(self, rows: torch.Tensor) -> tuple[torch.dtype, ...]:
        """Dtypes that results of the shape of ``rows`` may have."""
        return (self.spec.dtype,)

    def release(self, handle: Handle) -> None:
        """See ``Dispatcher.release``."""
        handle.release()
        if self._pending is handle:
            self._pending = None

    def observed(self) -> DispatcherReceipt:
        """See ``Dispatcher.observed``."""
        kind = type(self)
        return DispatcherReceipt(
            name=self.declaration.name,
            dispatcher=f"{kind.__module__}:{kind.__qualname__}",
            ranks=len(self.spec.experts),
            layouts=dict(self._layouts_seen),
            capacity={phase.value: tokens for phase, tokens in self.spec.capacity.items()},
            buffer_bytes=self.buffer_bytes,
            peak_bytes=self._peak_bytes,
            dispatches=self._dispatches,
            combines=self._combines,
            mode=self._mode(),
        )

    def _mode(self) -> str:
        """What the receipt says of the mode of the exchange."""
        return ""

    def close(self) -> None:
        """See ``Dispatcher.close``."""
        self._closed = True
        if self._pending is not None:
            self.release(self._pending)

    def _check_dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        scales: torch.Tensor | None,
    ) -> None:
        spec = self.spec
        if self._closed:
            raise ContractError("dispatch on a closed dispatcher")
        if self._pending is not None:
            raise ContractError("dispatch before the previous dispatch was combined or released")
        tokens = hidden.shape[0]
        if hidden.shape != (tokens, spec.hidden_size) or hidden.dtype != ROW_DTYPES[spec.row_dtype]:
            raise ContractError(
                f"rows are {tuple(hidden.shape)} {hidden.dtype}, "
                f"expected [n, {spec.hidden_size}] {spec.row_dtype}"
            )
        if tokens > spec.capacity[phase]:
            raise ContractError(
                f"{tokens} tokens in a {phase.value} step, the capacity of a rank is {spec.capacity[phase]}"
            )
        lanes = (tokens, spec.top_k)
        if ids.shape != lanes or ids.dtype != torch.int64:
            raise ContractError(f"ids are {tuple(ids.shape)} {ids.dtype}, expected {lanes} int64")
        if weights.shape != lanes or weights.dtype != torch.float32:
            raise ContractError(
                f"weights are {tuple(weights.shape)} {weights.dtype}, expected {lanes} float32"
            )
        if (scales is not None) != (spec.row_dtype == "fp8"):
            raise ContractError("fp8 rows come with scales, other rows without")
        if scales is not None:
            groups = (tokens, -(-spec.hidden_size // SCALE_GROUP))
            if scales.shape != groups or scales.dtype != torch.float32:
                raise ContractError(
                    f"scales are {tuple(scales.shape)} {scales.dtype}, expected {groups} float32"
                )
        if spec.validate:
            validate_routes(ids, spec.num_experts)


def _check_spec(spec: DispatcherSpec, declaration: A2ABackend) -> None:
    ranks = len(spec.experts)
    name = declaration.name
    for phase, layout in spec.layouts.items():
        if layout not in declaration.layouts[phase]:
            raise ContractError(f"{name} cannot produce {layout.value} rows in {phase.value}")
    if spec.row_dtype not in declaration.row_dtypes:
        raise ContractError(f"{name} cannot carry {spec.row_dtype} rows")
    if spec.dtype not in {ROW_DTYPES[known] for known in declaration.result_dtypes}:
        raise ContractError(f"{name} cannot bring results of {spec.dtype} home")
    if spec.device.type not in declaration.devices:
        raise ContractError(f"{name} does not run on {spec.device.type}")
    if not declaration.min_ranks <= ranks <= (declaration.max_ranks or ranks):
        raise ContractError(f"{name} does not run on {ranks} ranks")
    if declaration.hidden_sizes and spec.hidden_size not in declaration.hidden_sizes:
        raise ContractError(f"{name} does not carry rows of hidden size {spec.hidden_size}")
    if spec.hidden_size % declaration.hidden_multiple:
        raise ContractError(
            f"{name} needs a hidden size that is a multiple of {declaration.hidden_multiple}, "
            f"not {spec.hidden_size}"
        )
    for phase, most in declaration.max_capacity.items():
        if spec.capacity.get(phase, 0) > most:
            raise ContractError(f"{name} dispatches at most {most} tokens in {phase.value}")
    problem = routing_problem(declaration, ranks, spec.num_experts, spec.top_k)
    if problem:
        raise ContractError(f"{name} {problem}")


def _bytes_of(rows: ExpertInput) -> int:
    total = rows.rows.nbytes
    if rows.scales is not None:
        total += rows.scales.nbytes
    if isinstance(rows, ContiguousRows | MaskedRows) and rows.weights is not None:
        total += rows.weights.nbytes
    return total
