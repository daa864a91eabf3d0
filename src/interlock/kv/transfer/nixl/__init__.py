"""Backend ``nixl``: NVIDIA's transfer library with its UCX plugin."""

from interlock.kv.transfer.base import TransferBackend

BACKEND = TransferBackend(
    name="nixl",
    summary="NIXL over UCX between hosts: the decode server reads from staging memory",
    devices=frozenset({"cpu", "cuda"}),
    spans_hosts=True,
    packages=("nixl-cu13>=1.5",),
    sender="interlock.kv.transfer.nixl.ends:NixlSender",
    receiver="interlock.kv.transfer.nixl.ends:NixlReceiver",
    limits="run on one host; between hosts, RDMA and pages of a GPU: no recorded run",
    priority=4,
)
