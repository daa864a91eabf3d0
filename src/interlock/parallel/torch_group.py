"""Groups over torch.distributed (gloo on a CPU, NCCL on GPUs)."""

from __future__ import annotations

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchGroup:
    """A ``Group`` backed by a torch process group.

    Args:
        process_group: the torch process group; also used directly by backends that need other collectives.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.global_ranks = tuple(dist.get_process_group_ranks(process_group))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        flat = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _all_gather(flat, tensor, group=self.process_group)
        if dim == 0:
            return flat
        return torch.cat(flat.chunk(self.size), dim=dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        dist.broadcast(tensor, src=self.global_ranks[source], group=self.process_group)
        return tensor

    def barrier(self) -> None:
        # Without a device NCCL guesses one from the rank, which is wrong where ranks share GPUs.
        has_nccl = "nccl" in str(dist.get_backend_config(self.process_group))
        devices = [torch.cuda.current_device()] if has_nccl else None
        dist.barrier(group=self.process_group, device_ids=devices)
