"""What a dispatcher is built from, and what it does: the MoE contract. No torch at import time.

Legend: n tokens of this rank, N tokens of all ranks, k experts a token, h hidden size, E experts, L experts
of this rank, R received rows, M rows an expert may receive (ranks * T), T capacity of the phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from interlock.errors import InterlockError
from interlock.moe.a2a.rows import ExpertInput
from interlock.moe.terms import Layout, Phase

if TYPE_CHECKING:
    import torch

    from interlock.kernels.base import Kernels
    from interlock.parallel.topology import Groups


class ContractError(InterlockError):
    """A call that the MoE contract forbids; raised on the host before anything is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSpec:
    """Everything a dispatcher is built from. One dispatcher serves all MoE layers of a rank.

    Attributes:
        groups: of this rank; EP backends exchange within ``groups.ep``.
        experts: global ids held by each rank that takes part, in rank order.
        rank: this rank's index in ``experts``.
        row_dtype: "float32", "bfloat16" or "fp8": what ``dispatch`` is given.
        dtype: of the experts' results and of the combined output.
        capacity: T for each phase.
        alignment: A, multiple at which expert segments of the contiguous layout start.
        deterministic: the bits of the output must not depend on the number of ranks.
        timeout: seconds to wait for a peer before raising an error that names it.
        nodes: machines that the group is spread over evenly.
        mode: one of the backend's ``modes``, "" where it has none.
        validate: check every id (range, duplicates) and raise naming the token; meant for debugging.
    """

    groups: Groups
    experts: tuple[range, ...]
    rank: int
    num_experts: int
    top_k: int
    hidden_size: int
    row_dtype: str
    dtype: torch.dtype
    device: torch.device
    layouts: Mapping[Phase, Layout]
    capacity: Mapping[Phase, int]
    kernels: Kernels
    alignment: int = 1
    deterministic: bool = False
    timeout: float = 60.0
    nodes: int = 1
    mode: str = ""
    ranks_per_gpu: int = 1
    validate: bool = False

    @property
    def local_experts(self) -> range:
        return self.experts[self.rank]


@dataclass(slots=True, eq=False)
class Handle:
    """The way back of one dispatch: single-use. ``state`` is the dispatcher's own, dropped on release."""

    num_tokens: int
    phase: Phase
    state: Any
    released: bool = False

    def release(self) -> None:
        self.released = True
        self.state = None


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What the experts of this rank compute now, and the handle that brings the results home."""

    rows: ExpertInput
    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherReceipt:
    """What a live dispatcher observed of itself.

    Attributes:
        name: of the backend that was declared.
        dispatcher: "module:Class" of the object in use.
        ranks: size of the group it exchanges with.
        layouts: layout that was produced, for each phase that ran.
        capacity: T for each phase.
        buffer_bytes: bytes allocated when it was built.
        peak_bytes: largest number of bytes of rows that one dispatch held.
        dispatches, combines: calls that succeeded.
        mode: of the exchange, as the live object tells; "" where the backend has one way only.
    """

    name: str
    dispatcher: str
    ranks: int
    layouts: Mapping[str, str]
    capacity: Mapping[str, int]
    buffer_bytes: int
    peak_bytes: int
    dispatches: int
    combines: int
    mode: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class FindsLater(Protocol):
    """A dispatcher whose calls return before the device has done them, and find no error themselves."""

    def check(self) -> None:
        """Raise what the device has found in steps that have ended. Cheap; waits for nothing.

        Raises:
            EngineDeadError: names the rank that came too late, and for what.
            ContractError: a call that the contract forbids, which only the device could see.
        """
        ...


class Dispatcher(Protocol):
    """Moves tokens to their experts and the results home. Collective: all ranks make the same calls.

    Subclass ``interlock.moe.a2a.checked.CheckedDispatcher`` to get the contract's checks.
    """

    def dispatch(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        phase: Phase,
        *,
        scales: torch.Tensor | None = None,
    ) -> Dispatched:
        """hidden [n, h], ids int64 [n, k] (global, distinct in a row, -1 unused), weights float32 [n, k].

        n may be 0 and may differ between ranks. ``scales`` float32 [n, h / 128] comes with fp8 rows.

        Raises:
            ContractError: n > T, wrong shapes or dtypes, or the previous handle was not combined. Nothing
                has been sent then.
        """
        ...

    def combine(self, rows: torch.Tensor, handle: Handle) -> torch.Tensor:
        """The experts' results, in the layout of the handle -> [n, h], summed over a token's lanes.

        Lanes are summed in ascending order in float32 and rounded once. The handle is released even when
        this raises.
        """
        ...

    def release(self, handle: Handle) -> None:
        """Give up on a dispatch whose results will never come (an error in between). Idempotent."""
        ...

    def observed(self) -> DispatcherReceipt: ...

    def close(self) -> None:
        """Free buffers. Idempotent; no other call is allowed afterwards."""
        ...
