"""Buffers that are the same on every rank: rank 0's."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fsdp.comm.communicator import Communicator


@torch.no_grad()
def broadcast_buffers(module: nn.Module, world_comm: Communicator) -> None:
    """Overwrite every buffer of `module` with that of rank 0: one collective for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in module.buffers():
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        mine = torch.cat([buffer.reshape(-1) for buffer in buffers])
        together = mine.clone()
        world_comm.broadcast(together, 0, "buffers").wait()
        # what is the same is left alone: a graph may have saved it
        if not torch.equal(together, mine):
            _give_out(together, buffers)


def _give_out(together: Tensor, buffers: Iterable[Tensor]) -> None:
    taken = 0
    for buffer in buffers:
        buffer.copy_(together[taken : taken + buffer.numel()].view(buffer.shape))
        taken += buffer.numel()
