"""What an all-to-all (a2a) backend declares, and the sizes and sites that it is asked about. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from interlock.moe.terms import Layout, Phase


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
