"""Tensors of all ranks in a few collectives, outside the gathers of a step: parts, copies and buffers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fsdp.comm.communicator import Communicator


def broadcast_all(parts: Sequence[tuple[int, Tensor]], comm: Communicator, label: str) -> None:
    """Overwrite each contiguous tensor with the one that its source rank (the number beside it) has, and wait."""
    works = [comm.broadcast(t, source, label) for source, t in parts if t.numel()]
    for work in works:
        work.wait()


def copy_from(source: int, tensor: Tensor, comm: Communicator, label: str) -> Tensor:
    """The tensor of rank `source`, contiguous and in memory of its own. It has the shape of this rank's."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    broadcast_all([(source, copy)], comm, label)
    return copy


def gather_rows(comm: Communicator, row: Tensor, label: str) -> Tensor:
    """The rows (k,) of all ranks, each contiguous and as long as the others: (W, k). Communicates."""
    rows = row.new_empty(comm.size, row.numel())
    rows[comm.rank].copy_(row)
    comm.all_gather(rows.view(-1), label).wait()
    return rows


def gather_parts(
    full: Tensor, parts: Iterable[tuple[int, int, int]], mine: Tensor | None, comm: Communicator, label: str
) -> Tensor:
    """Fill `full`, a contiguous tensor, on every rank; return it.

    `parts`: (rank, first, numel), the elements of the flattened tensor that each rank has. `mine`: what this rank has.
    """
    flat = full.view(-1)
    places = [(rank, flat[first : first + numel]) for rank, first, numel in parts]
    for rank, place in places:
        if rank == comm.rank and place.numel():
            assert mine is not None
            place.copy_(mine.reshape(-1))
    broadcast_all(places, comm, label)
    return full


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
