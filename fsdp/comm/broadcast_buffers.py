"""Makes the buffers of modules the same on every rank."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fsdp.comm.communicator import Communicator


@torch.no_grad()
def broadcast_buffers(modules: Iterable[nn.Module], world_comm: Communicator, source: int = 0, label: str = "buffers") -> None:
    """Overwrite every buffer of `modules` with those of rank `source`.

    Traffic: one broadcast for each dtype and device.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in dict.fromkeys(buffer for module in modules for buffer in module.buffers()):
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    for buffers in kinds.values():
        mine = torch.cat([buffer.reshape(-1) for buffer in buffers])
        together = mine.clone()
        world_comm.broadcast(together, source, label).wait()
        # equal buffers are not written, because a graph may have saved them
        if not torch.equal(together, mine):
            for buffer, values in zip(buffers, torch.split(together, [one.numel() for one in buffers]), strict=True):
                buffer.copy_(values.view(buffer.shape))
