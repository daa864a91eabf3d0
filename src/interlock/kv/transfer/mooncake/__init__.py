"""Backend ``mooncake``: the Mooncake transfer engine, over TCP, or over RDMA where the machine has it."""

from interlock.kv.transfer.base import TransferBackend

BACKEND = TransferBackend(
    name="mooncake",
    summary="the Mooncake transfer engine between hosts: the decode server reads from staging memory",
    devices=frozenset({"cpu", "cuda"}),
    spans_hosts=True,
    one_of=(
        "mooncake-transfer-engine-non-cuda>=0.3.9",
        "mooncake-transfer-engine-cuda13>=0.3.9",
        "mooncake-transfer-engine>=0.3.9",
    ),
    libraries=("libibverbs.so.1",),
    remedy="apt-get install libibverbs1, or the RDMA drivers' own",
    sender="interlock.kv.transfer.mooncake.ends:MooncakeSender",
    receiver="interlock.kv.transfer.mooncake.ends:MooncakeReceiver",
    environment=(("MC_TCP_ENABLE_CONNECTION_POOL", "1"), ("MC_TCP_SLICE_SIZE", str(1 << 20))),
    limits="run over TCP; RDMA, taken where /sys/class/infiniband names a device, and pages of a GPU: "
    "no recorded run",
    priority=5,
)
