"""Backend ``shared_memory``: two servers on one host. On a CPU the prefill server maps the decode server's
pools, which are anonymous shared memory, and writes to them; pages of a GPU go through page-locked staging
memory that both map."""

from interlock.kv.transfer.base import TransferBackend

BACKEND = TransferBackend(
    name="shared_memory",
    summary="both servers on one host; CPU: pages are written into the other's pools, one copy; "
    "CUDA: through page-locked host memory",
    devices=frozenset({"cpu", "cuda"}),
    spans_hosts=False,
    sender="interlock.kv.transfer.shared_memory.pools:SharedSender",
    receiver="interlock.kv.transfer.shared_memory.pools:SharedReceiver",
    limits="both servers must run as one user in one process namespace; pages of a GPU: run on one H200, "
    "a pair with eager decode steps; with decode graphs: no recorded run",
    priority=10,
)
