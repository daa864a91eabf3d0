"""Backend ``shared_memory``: two servers on one host. The decode server's pools are anonymous shared memory,
which the prefill server maps and writes to."""

from interlock.kv.transfer.base import TransferBackend

BACKEND = TransferBackend(
    name="shared_memory",
    summary="both servers on one host, CPU: pages are written into the other's pools, one copy",
    devices=frozenset({"cpu"}),
    spans_hosts=False,
    sender="interlock.kv.transfer.shared_memory.pools:SharedSender",
    receiver="interlock.kv.transfer.shared_memory.pools:SharedReceiver",
    priority=10,
)
