"""What an all-to-all (a2a) backend declares, and what its dispatcher does. No torch at import time.

Legend: n tokens of this rank, N tokens of all ranks, k experts a token, h hidden size, E experts, L experts
of this rank, R received rows, M rows an expert may receive (ranks * T), T capacity of the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from interlock.errors import InterlockError
from interlock.moe.terms import Layout, Phase

if TYPE_CHECKING:
    import torch

    from interlock.kernels.base import Kernels
    from interlock.parallel.topology import Groups

SCALE_GROUP = 128
"""Channels that share one float32 scale in a row of fp8 (e4m3)."""


class ContractError(InterlockError):
    """A call that the MoE contract forbids; raised on the host before anything is sent."""


@dataclass(frozen=True, slots=True)
class BufferShape:
    """The sizes that decide how much memory a dispatcher needs on one rank.

    Attributes:
        ranks: size of the EP group.
        num_experts: E, of all ranks.
        row_bytes: bytes of one dispatched row (h * element size).
        scale_bytes: bytes of the scales of one row, 0 for rows that are not quantised.
        result_bytes: bytes of one row of the experts' results.
        capacity: T for each phase.
        layouts: layout of each phase.
        alignment: A, multiple at which expert segments of the contiguous layout start.
        nodes: machines that the group is spread over evenly.
        mode: one of the backend's ``modes``, "" where it has none.
        ranks_per_gpu: ranks whose kernels run beside this one's on the same GPU, itself included.
    """

    ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    row_bytes: int
    scale_bytes: int
    result_bytes: int
    capacity: Mapping[Phase, int]
    layouts: Mapping[Phase, Layout]
    alignment: int = 1
    nodes: int = 1
    mode: str = ""


class NcclVersion(Protocol):
    """One NCCL library of a machine. ``version`` is "" and ``numbers`` () where nothing tells it."""

    @property
    def path(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def numbers(self) -> tuple[int, ...]: ...


class SiteFacts(Protocol):
    """What a backend's own check may know of a machine: see ``interlock.plan.facts.MachineFacts``."""

    @property
    def packages(self) -> Mapping[str, str]: ...

    @property
    def environment(self) -> Mapping[str, str]: ...

    @property
    def rdma_devices(self) -> tuple[str, ...]: ...

    @property
    def nccl(self) -> Sequence[NcclVersion]: ...


class Site(Protocol):
    """Where a backend would be used, as its own ``check`` sees it. ``ep_size`` is None where not decided."""

    @property
    def nnodes(self) -> int: ...

    @property
    def ep_size(self) -> int | None: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def facts(self) -> SiteFacts: ...


@dataclass(frozen=True, slots=True)
class Modes:
    """Ways of exchanging that a user chooses with an option of the backend's own.

    ``option`` is the option's name; ``one_node`` and ``several_nodes`` list what works there, the first
    being taken when the user leaves it open.
    """

    option: str
    one_node: tuple[str, ...]
    several_nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class A2ABackend:
    """Capabilities of one backend, joined by the planner with those of the runners.

    Attributes:
        layouts: layouts of dispatched rows it can produce, for each phase.
        row_dtypes: rows it can carry: "float32", "bfloat16", "fp8" (e4m3 with a scale per 128 channels).
        devices: "cpu", "cuda".
        links: connections between ranks it can use: "shared_memory", "tcp", "nvlink", "pcie", "rdma".
        min_ranks, max_ranks: size of the EP group.
        hidden_multiple: the hidden size must be a multiple of it. hidden_sizes: the only ones, () for any.
        packages: distributions that must be installed.
        native: needs the project's compiled CPU library.
        capturable: phases whose dispatch and combine can be captured in a CUDA graph.
        applies_weights: combine multiplies by the routing weights; then runners get rows without weights.
        overlap: two dispatchers of a group may be in use at once, and their calls may come from another
            stream (on a CPU, thread) than the work beside them: see ``moe/overlap.py``.
        fixed_capacity: buffers are allocated at start-up; else ``buffer_bytes`` is a peak of transient rows.
        requires_full_ep: every rank of the world must hold different experts (ep_size == tp_size).
        ordered_rows: rows of one expert are ordered by (source rank, token), so layouts are reproducible.
        result_dtypes: dtypes that results can come home in.
        even_experts: the number of experts must be a multiple of the number of ranks.
        max_top_k, max_local_experts: most experts a token, most experts on a rank; None for any.
        max_capacity: most T of a phase, where there is a limit.
        min_capability: least compute capability of a GPU.
        modes: ways of exchanging that the user chooses between, None for one way.
        check: why it cannot be used at a site, beyond what the fields say, or None: one line that ends in
            what to do. Imports nothing heavy.
        distributions: packages whose versions ``check`` looks at. ``variables``: environment variables.
        uneven_graphs: in one step, ranks may replay graphs of different sizes, or run it eagerly.
        priority: of --moe-a2a-backend auto where experts are spread; 0 is taken only when it is asked for.
        compiles_sizes: its kernels are compiled for each combination of sizes, which takes seconds.
        never_run: what it still has to be run on before anything is claimed; "" once it was.
        buffer_bytes: bytes one rank needs.
        dispatcher: "module:Class", constructed with a ``DispatcherSpec``.
    """

    name: str
    summary: str
    layouts: Mapping[Phase, frozenset[Layout]]
    row_dtypes: frozenset[str]
    devices: frozenset[str]
    links: frozenset[str]
    buffer_bytes: Callable[[BufferShape], int]
    dispatcher: str
    min_ranks: int = 1
    max_ranks: int | None = None
    hidden_multiple: int = 1
    hidden_sizes: tuple[int, ...] = ()
    packages: tuple[str, ...] = ()
    native: bool = False
    capturable: frozenset[Phase] = frozenset()
    applies_weights: bool = False
    overlap: bool = False
    fixed_capacity: bool = False
    requires_full_ep: bool = True
    ordered_rows: bool = True
    result_dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    even_experts: bool = False
    max_top_k: int | None = None
    max_local_experts: int | None = None
    max_capacity: Mapping[Phase, int] = field(default_factory=dict)
    min_capability: tuple[int, int] = (0, 0)
    modes: Modes | None = None
    check: Callable[[Site], str | None] | None = None
    distributions: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    uneven_graphs: bool = False
    priority: int = 0
    compiles_sizes: bool = False
    never_run: str = ""

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks may live on several machines."""
        return bool(self.links & {"tcp", "rdma"})


def routing_problem(backend: A2ABackend, ranks: int, num_experts: int, top_k: int) -> str | None:
    """Why ``backend`` cannot route over so many ranks, experts and choices, or None."""
    local = -(-num_experts // ranks)
    if backend.even_experts and num_experts % ranks:
        return f"needs a number of experts that {ranks} ranks hold evenly, not {num_experts}"
    if backend.max_top_k is not None and top_k > backend.max_top_k:
        return f"routes a token to at most {backend.max_top_k} experts, not {top_k}"
    if backend.max_local_experts is not None and local > backend.max_local_experts:
        return f"holds at most {backend.max_local_experts} experts on a rank, not {local}"
    return None


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


@dataclass(frozen=True, slots=True)
class ReplicatedRows:
    """All tokens; ``ids`` are local expert ids, -1 where the expert is elsewhere or the slot is unused.

    rows [N, h], ids int64 [N, k], weights float32 [N, k], scales float32 [N, h / 128] for fp8 rows.
    The runner returns [N, k, h]; lanes with id -1 may hold anything. Where ``sums`` is a dtype, ``combine``
    also takes [N, h] of that dtype: a token's lanes added in ascending order in float32 and rounded once.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None
    sums: torch.dtype | None = None

    @property
    def layout(self) -> Layout:
        return Layout.REPLICATED


@dataclass(frozen=True, slots=True)
class ContiguousRows:
    """Rows grouped by local expert, every segment starting at a multiple of ``alignment``.

    rows [R, h] (R a multiple of ``alignment``; rows between segments may hold anything), psum int32 [L]:
    ``psum[i] = start(i) + count(i)`` with ``start(0) = 0`` and ``start(i)`` = psum[i - 1] rounded up;
    counts int32 [L], the true counts; weights float32 [R]; scales float32 [R, h / 128] for fp8 rows.
    psum and counts are on the host when the device is the CPU. The runner returns [R, h].
    """

    rows: torch.Tensor
    psum: torch.Tensor
    counts: torch.Tensor
    alignment: int
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None

    @property
    def layout(self) -> Layout:
        return Layout.CONTIGUOUS


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """A slab with static shape: rows [L, M, h], of which the first ``counts[e]`` of each expert are filled.

    counts int32 [L], weights float32 [L, M], scales float32 [L, M, h / 128] for fp8 rows. Rows at and beyond
    the count may hold anything and are never read. The runner returns [L, M, h].

    ``results`` [L, M, h] of the results' dtype, or None: where ``combine`` would have them without a copy. A
    runner may write there and return it.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None = None
    results: torch.Tensor | None = None

    @property
    def layout(self) -> Layout:
        return Layout.MASKED


ExpertInput = ReplicatedRows | ContiguousRows | MaskedRows


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
