"""Whether ElasticBuffer can be built at a site: package, NCCL, network; each complaint has the way out."""

from __future__ import annotations

from interlock.moe.a2a.backend import Site
from interlock.moe.a2a.deepep.package import elastic_problem

DISABLE_GIN = "EP_DISABLE_GIN"
NCCL_ROOT = "EP_NCCL_ROOT_DIR"
VARIABLES = (DISABLE_GIN, NCCL_ROOT)
LEAST_NCCL = (2, 30, 4)


def problem(site: Site) -> str | None:
    """Why not, or None."""
    return elastic_problem(site.facts.packages) or _nccl_problem(site) or _gin_problem(site)


def _nccl_problem(site: Site) -> str | None:
    """NCCL that ranks load must be new enough, and be the one whose headers the kernels are compiled with."""
    libraries = site.facts.nccl
    if not libraries:
        return None
    loaded = libraries[0]
    if loaded.numbers and loaded.numbers < LEAST_NCCL:
        newer = next((library for library in libraries if library.numbers >= LEAST_NCCL), None)
        way_out = (
            f"start with LD_PRELOAD={newer.path} {NCCL_ROOT}={_root_of(newer.path)}"
            if newer
            else "pip install --no-deps --target nccl 'nvidia-nccl-cu13>=2.30.4', and start with "
            f"LD_PRELOAD=nccl/nvidia/nccl/lib/libnccl.so.2 {NCCL_ROOT}=nccl/nvidia/nccl"
        )
        return f"needs NCCL 2.30.4 or later, and ranks would load {loaded.version}: {way_out}"
    root = site.facts.environment.get(NCCL_ROOT)
    compiled = next((library for library in libraries if root and library.path.startswith(root)), None)
    if compiled and loaded.version and compiled.version and compiled.version != loaded.version:
        return (
            f"compiles its kernels for NCCL {compiled.version} ({NCCL_ROOT}={root}), and ranks would load "
            f"{loaded.version} ({loaded.path}): give both one version"
        )
    return None


def _root_of(library: str) -> str:
    return library.rpartition("/lib/")[0] or library


def _gin_problem(site: Site) -> str | None:
    """GIN is NCCL's way to other machines; the library asks for it even on one, unless told not to."""
    if site.ep_size == 1:
        return None
    disabled = site.facts.environment.get(DISABLE_GIN, "0") not in ("", "0")
    network = bool(site.facts.rdma_devices)
    if site.nnodes > 1 and disabled:
        return f"needs GIN between machines, and {DISABLE_GIN} is set: unset {DISABLE_GIN}"
    if site.nnodes > 1 and not network:
        return "needs RDMA devices between machines, and this one has none in /sys/class/infiniband"
    if site.nnodes == 1 and not network and not disabled:
        return (
            "asks NCCL for GIN, which needs RDMA devices, and this machine has none: "
            f"on one machine set {DISABLE_GIN}=1"
        )
    return None
