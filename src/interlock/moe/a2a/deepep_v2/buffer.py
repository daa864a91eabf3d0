"""Opening ElasticBuffer: its arguments, its size against the plan's, and its complaints in our words."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from interlock.errors import EngineDeadError, StartupError
from interlock.moe.a2a.checked import buffer_shape
from interlock.moe.a2a.contract import DispatcherSpec
from interlock.moe.a2a.deepep.library import closed_to_torch_fills, load_library
from interlock.moe.a2a.deepep.package import how_to_install
from interlock.moe.a2a.deepep_v2.fitness import DISABLE_GIN, NCCL_ROOT
from interlock.moe.a2a.deepep_v2.sizes import HYBRID, symmetric_bytes
from interlock.moe.a2a.torch_groups import process_group, refuse_capture
from interlock.plan.nccl import loaded_version

BACKEND_FLAG = "--moe-a2a-backend deepep_v2"
COMPILE_SECONDS = 100
"""Least time that a kernel waits on the device for its peers: one of them may still be compiling."""
LEAST_SMS = 4
"""The fewest that the library takes of itself."""
_HEADER = re.compile(r"^#define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+)", re.MULTILINE)


def load_elastic() -> Any:
    """The module ``deep_ep`` with ElasticBuffer. Raises StartupError."""
    return load_library(BACKEND_FLAG, "ElasticBuffer", _way_out)


def open_buffer(library: Any, spec: DispatcherSpec) -> Any:
    """Build the buffer of this rank. Collective over the EP group, and not allowed within a graph capture.

    Raises:
        StartupError: the library refuses, or its size is beyond the plan's.
    """
    refuse_capture(BACKEND_FLAG, spec.device)
    group = process_group(spec.groups.ep)
    largest, fp8 = max(spec.capacity.values()), spec.row_dtype == "fp8"
    hybrid = spec.mode == HYBRID
    check_nccl(library, spec)
    spec.groups.ep.barrier()  # the library takes the communicator that torch makes at its first use
    try:
        hint = library.ElasticBuffer.get_buffer_size_hint(
            group,
            largest,
            spec.hidden_size,
            spec.top_k,
            use_fp8_dispatch=fp8,
            allow_hybrid_mode=hybrid,
            allow_multiple_reduction=False,
        )
        planned = symmetric_bytes(buffer_shape(spec), largest, fp8=fp8)
        if hint > planned:
            raise StartupError(
                f"{BACKEND_FLAG}: the plan reserves {planned} bytes for ElasticBuffer, and the library wants "
                f"{hint}: the links between these ranks are not what --nnodes {spec.nodes} says "
                "(without NVLink between all ranks of a machine it needs room to send from)"
            )
        return library.ElasticBuffer(
            group,
            num_max_tokens_per_rank=largest,
            hidden=spec.hidden_size,
            num_topk=spec.top_k,
            use_fp8_dispatch=fp8,
            deterministic=False,
            allow_hybrid_mode=hybrid,
            allow_multiple_reduction=False,
            prefer_overlap_with_compute=False,
            num_cpu_timeout_secs=wait_seconds(spec),
            num_gpu_timeout_secs=wait_seconds(spec),
            explicitly_destroy=True,
        )
    except StartupError:
        raise
    except Exception as error:  # assertions of the library and of NCCL
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise StartupError(
            f"{BACKEND_FLAG}: ElasticBuffer cannot be built: {first}. {_way_out(str(error))}"
        ) from error


def share_of_sms(spec: DispatcherSpec) -> int:
    """SMs that an exchange may hold, even; 0 leaves it to the library. Its blocks wait for those of the peers
    and fill an SM each, so where ranks share a GPU all of theirs must fit on it at once."""
    if spec.ranks_per_gpu == 1 or spec.device.type != "cuda":
        return 0
    sms: int = torch.cuda.get_device_properties(spec.device).multi_processor_count
    return max(LEAST_SMS, sms // spec.ranks_per_gpu // 2 * 2)


def wait_seconds(spec: DispatcherSpec) -> int:
    """Seconds that host and device wait for a peer."""
    return max(COMPILE_SECONDS, int(spec.timeout))


def check_nccl(library: Any, spec: DispatcherSpec) -> None:
    """NCCL in this process must be the one whose headers the kernels are compiled with.

    Raises:
        StartupError: it is another version; both are named.
    """
    if spec.device.type != "cuda":
        return
    root = importlib.import_module("deep_ep.utils.find_pkgs").find_nccl_root(optional=True)
    compiled = header_version(Path(root or "") / "include" / "nccl.h")
    loaded = loaded_version()
    if compiled and loaded and compiled != loaded:
        raise StartupError(
            f"{BACKEND_FLAG}: deep_ep compiles its kernels for NCCL {_dotted(compiled)} ({root}), and this "
            f"process has loaded NCCL {_dotted(loaded)}: start with LD_PRELOAD={root}/lib/libnccl.so.2, or "
            f"point {NCCL_ROOT} at the NCCL that is loaded and build deep_ep with it"
        )


def header_version(header: Path) -> tuple[int, ...]:
    """The version that ``nccl.h`` states, or ()."""
    if not header.is_file():
        return ()
    numbers = dict(_HEADER.findall(header.read_text(encoding="utf-8", errors="replace")))
    parts = [numbers.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    return tuple(int(part) for part in parts if part is not None)


@contextmanager
def library_call(what: str, step: int) -> Iterator[None]:
    """Around calls of the library: its time-outs name the late ranks, and its demands on torch are met."""
    try:
        with closed_to_torch_fills():
            yield
    except RuntimeError as error:
        text = str(error)
        if "CPU wait" in text:
            late = late_ranks(text)
            named = f"expert-parallel ranks {late}" if late else "a rank"
            raise EngineDeadError(
                f"{named} did not reach the {what} of step {step} in time: {text}"
            ) from error
        raise


def late_ranks(text: str) -> list[int]:
    """Ranks whose count is still 0 in the library's "received count (...): a b c # ..." (others are < 0)."""
    found = re.search(r"received count \([^)]*\): ([-\d ]+)#", text)
    counts = [int(word) for word in found.group(1).split()] if found else []
    return [rank for rank, count in enumerate(counts) if count == 0]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _way_out(text: str) -> str:
    """What to do about a complaint of the library."""
    if "GIN" in text or "Gin" in text:
        return f"On one machine set {DISABLE_GIN}=1; between machines NCCL needs RDMA devices that offer GIN"
    if "NCCL" in text or "libnccl" in text:
        return (
            "NCCL must be the version that deep_ep was built with: preload it (LD_PRELOAD) and name its "
            f"folder in {NCCL_ROOT}"
        )
    return how_to_install()
