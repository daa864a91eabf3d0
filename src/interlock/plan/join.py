"""Joining declarations: which a2a backend, runner and layouts go together here, and why others do not.

The only knowledge of a backend or runner is what it declares; no name appears in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from interlock.kernels.availability import capability_of
from interlock.kv.transfer.base import TransferBackend
from interlock.moe.a2a.backend import routing_problem
from interlock.moe.terms import Layout, Phase
from interlock.plan.facts import MachineFacts

if TYPE_CHECKING:
    from interlock.moe.a2a.backend import A2ABackend
    from interlock.moe.experts.base import ExpertRunner
    from interlock.nn.attention_backends.base import AttentionBackend

PREFERRED: Final[Mapping[Phase, tuple[Layout, ...]]] = {
    Phase.PREFILL: (Layout.CONTIGUOUS, Layout.MASKED, Layout.REPLICATED),
    Phase.DECODE: (Layout.MASKED, Layout.CONTIGUOUS, Layout.REPLICATED),
}


def _registered_attention() -> Mapping[str, AttentionBackend]:
    from interlock.nn.attention_backends.registry import attention_backends

    return attention_backends().entries


@dataclass(frozen=True, slots=True)
class Declarations:
    """Everything registered, by name."""

    a2a: Mapping[str, A2ABackend]
    runners: Mapping[str, ExpertRunner]
    transfers: Mapping[str, TransferBackend] = field(default_factory=dict)
    attention: Mapping[str, AttentionBackend] = field(default_factory=_registered_attention)

    @staticmethod
    def registered() -> Declarations:
        """Built-in and third-party declarations."""
        from interlock.kv.transfer.registry import transfer_backends
        from interlock.moe.a2a.registry import a2a_backends
        from interlock.moe.experts.registry import expert_runners

        return Declarations(a2a_backends().entries, expert_runners().entries, transfer_backends().entries)

    def packages(self) -> set[str]:
        """Distribution names that any declaration needs."""
        requirements = [text for backend in self.a2a.values() for text in backend.packages]
        requirements += [text for runner in self.runners.values() for text in runner.packages]
        requirements += [text for backend in self.attention.values() for text in backend.packages]
        transfers = self.transfers.values()
        requirements += [text for each in transfers for text in (*each.packages, *each.one_of)]
        looked_at = {name for backend in self.a2a.values() for name in backend.distributions}
        return {requirement_name(text) for text in requirements} | looked_at

    def variables(self) -> set[str]:
        """Environment variables that any declaration looks at."""
        return {name for backend in self.a2a.values() for name in backend.variables}

    def libraries(self) -> set[str]:
        """System libraries that any declaration needs."""
        return {name for transfer in self.transfers.values() for name in transfer.libraries}


@dataclass(frozen=True, slots=True)
class Situation:
    """What declarations are matched against.

    Attributes:
        weight_format: what weights are offered in: the checkpoint's, or fp8 blocks made while loading.
        weight_block: of the checkpoint's fp8 blocks.
        quantization: "fp8" wants experts held as fp8 blocks, "none" wants none; None leaves it to the runner.
        local_gpus: GPUs of this machine that the ranks use, the first ones.
        ep_size: None where the size is not decided yet. num_experts, top_k: None for any model.
    """

    device: str
    kernels: str
    dtype: str
    weight_format: str
    hidden_size: int
    nnodes: int
    deterministic: bool
    facts: MachineFacts
    local_gpus: int = 1
    ep_size: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    quantization: str | None = None
    weight_block: tuple[int, int] = (128, 128)

    def with_ep_size(self, ep_size: int) -> Situation:
        return replace(self, ep_size=ep_size)


def exchanges(backend: A2ABackend) -> bool:
    """Whether tokens move between ranks in any phase (some layout is not ``REPLICATED``)."""
    return any(layout is not Layout.REPLICATED for layouts in backend.layouts.values() for layout in layouts)


def a2a_problem(backend: A2ABackend, here: Situation) -> str | None:
    """Why ``backend`` cannot be used, or None."""
    if here.device not in backend.devices:
        return f"runs on {_list(backend.devices)}, not on {here.device}"
    if here.nnodes > 1 and not backend.spans_nodes:
        return f"reaches ranks of one machine only, and --nnodes is {here.nnodes}"
    if (problem := link_problem(backend, here)) is not None:
        return problem
    if here.dtype not in backend.row_dtypes:
        return f"carries rows of {_list(backend.row_dtypes)}, not {here.dtype}"
    if backend.hidden_sizes and here.hidden_size not in backend.hidden_sizes:
        sizes = ", ".join(map(str, backend.hidden_sizes))
        return f"carries rows of hidden sizes {sizes}, not {here.hidden_size}"
    if here.hidden_size % backend.hidden_multiple:
        return f"needs a hidden size that is a multiple of {backend.hidden_multiple}, not {here.hidden_size}"
    if here.ep_size is not None and here.ep_size < backend.min_ranks:
        return f"needs at least {backend.min_ranks} expert-parallel ranks, not {here.ep_size}"
    if here.ep_size is not None and backend.max_ranks is not None and here.ep_size > backend.max_ranks:
        return f"works with at most {backend.max_ranks} expert-parallel ranks, not {here.ep_size}"
    if here.ep_size is not None and here.num_experts is not None and here.top_k is not None:
        problem = routing_problem(backend, here.ep_size, here.num_experts, here.top_k)
        if problem is not None:
            return problem
    if backend.native and here.facts.native_kernels_problem:
        return f"needs the compiled CPU library: {here.facts.native_kernels_problem}"
    problem = capability_problem(backend, here)
    if problem is None and backend.check is not None:
        problem = backend.check(here)
    return problem or package_problem(backend.packages, here.facts)


def link_problem(backend: A2ABackend, here: Situation) -> str | None:
    """Why ``backend`` cannot connect the GPUs that the ranks of this machine use, or None."""
    usable = backend.links - {"nvlink"} - (frozenset() if here.facts.rdma_devices else {"rdma"})
    if here.device != "cuda" or "nvlink" not in backend.links or usable:
        return None
    apart = next((pair for pair in here.facts.gpus_apart if max(pair) < here.local_gpus), None)
    if apart is None:
        return None
    wanted = "NVLink or RDMA" if "rdma" in backend.links else "NVLink"
    return f"needs {wanted} between the GPUs, and GPUs {apart[0]} and {apart[1]} have none"


def runner_problem(runner: ExpertRunner, here: Situation) -> str | None:
    """Why ``runner`` cannot be used, whatever the a2a backend, or None."""
    if here.device not in runner.devices:
        return f"runs on {_list(runner.devices)}, not on {here.device}"
    if runner.kernels and here.kernels not in runner.kernels:
        return f"needs --kernels {' or '.join(sorted(runner.kernels))}, not {here.kernels}"
    if here.dtype not in runner.activation_dtypes or here.dtype not in runner.row_dtypes:
        return f"computes in {_list(runner.activation_dtypes)}, not {here.dtype}"
    if here.weight_format not in runner.weight_formats:
        return f"loads weights in {_list(runner.weight_formats)}, not {here.weight_format}"
    held = "fp8_block" if not runner.dequantises else here.dtype
    if here.quantization == "fp8" and runner.dequantises:
        return f"holds weights in {held}, and --quantization fp8 wants fp8 blocks"
    if here.quantization == "none" and not runner.dequantises:
        return f"holds weights in {held}, and --quantization none wants {here.dtype}"
    if not runner.dequantises and here.weight_block != (128, 128):
        rows, columns = here.weight_block
        return f"computes fp8 blocks of 128x128, not {rows}x{columns}"
    if here.hidden_size % runner.hidden_multiple:
        return f"needs a hidden size that is a multiple of {runner.hidden_multiple}, not {here.hidden_size}"
    problem = capability_problem(runner, here)
    if problem is not None:
        return problem
    if here.deterministic and not runner.row_invariant:
        return "is not row-invariant, which --deterministic needs"
    return package_problem(runner.packages, here.facts) or runner.missing or None


def capability_problem(wanting: ExpertRunner | A2ABackend | AttentionBackend, here: Situation) -> str | None:
    """Why the GPUs of this machine are too old or too new for a declaration, or None."""
    if here.device != "cuda":
        return None
    low, high = wanting.min_capability, getattr(wanting, "max_capability", None)
    for device in here.facts.devices:
        found = capability_of(device.capability)
        if found < low or (high is not None and found > high):
            wanted = f"{low[0]}.{low[1]}" + (
                " or more" if high is None else "" if high == low else f" to {high[0]}.{high[1]}"
            )
            return f"needs a GPU of compute capability {wanted}, not {device.capability or 'an unknown one'}"
    return None


def shared_layout(backend: A2ABackend, runner: ExpertRunner, phase: Phase) -> Layout | None:
    """The layout that both know in ``phase``, by preference; None where the pair does not exist."""
    common = backend.layouts.get(phase, frozenset()) & runner.layouts
    return next((layout for layout in PREFERRED[phase] if layout in common), None)


def pair_problem(backend: A2ABackend, runner: ExpertRunner) -> str | None:
    """Why the two do not go together, or None."""
    for phase in Phase:
        if shared_layout(backend, runner, phase) is None:
            return (
                f"in {phase} it takes rows as {_list(runner.layouts)}, and "
                f"--moe-a2a-backend {backend.name} gives {_list(backend.layouts.get(phase, ()))}"
            )
    return None


def requirement_name(requirement: str) -> str:
    """``"torch>=2.11"`` -> ``"torch"``."""
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def package_problem(requirements: Iterable[str], facts: MachineFacts, *, install: str = "") -> str | None:
    """The first of ``requirements`` (PEP 508 texts) that is missing or has another version, or None.

    Args:
        install: the command that installs them, where it is not ``pip install`` with the requirement.
    """
    for text in requirements:
        from packaging.requirements import Requirement

        needed = Requirement(text)
        version = facts.packages.get(needed.name)
        how = install or f"pip install '{text}'"
        if version is None:
            return f"needs the package {text}, which is not installed ({how})"
        if not needed.specifier.contains(version, prereleases=True):
            return f"needs the package {text}; {version} is installed ({how})"
    return None


def candidates(
    backend: A2ABackend, runners: Mapping[str, ExpertRunner], here: Situation
) -> Iterator[tuple[ExpertRunner, str | None]]:
    """Runners by descending priority, each with why it cannot serve ``backend`` here, or None."""
    for runner in sorted(runners.values(), key=lambda runner: (-runner.priority, runner.name)):
        yield runner, runner_problem(runner, here) or pair_problem(backend, runner)


def _list(names: Iterable[str]) -> str:
    return " or ".join(sorted(map(str, names))) or "nothing"
