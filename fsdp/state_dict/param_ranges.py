"""Ranges of the whole flat buffer of a unit, gathered from all ranks or handed out from one, with bounded memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.state_dict.param_shard import ParamShard


class ParamRange(NamedTuple):
    """Parameters of one flat buffer that follow each other there: elements `start` to `end` of the whole."""

    flat: FlatBuffer
    param_shards: tuple[ParamShard, ...]

    @property
    def start(self) -> int:
        return self.flat.layout.slots[self.param_shards[0].number].start

    @property
    def end(self) -> int:
        return self.flat.layout.slots[self.param_shards[-1].number].end

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.flat.shard.element_size()

    def empty(self, memory: Tensor | None = None) -> Tensor:
        """Memory for it: (end - start,), in the parameters' own dtype; of `memory` (bytes, at least as many), if given."""
        if memory is not None:
            return memory[: self.nbytes].view(self.flat.shard.dtype)
        return torch.empty(self.end - self.start, dtype=self.flat.shard.dtype, device=self.flat.device)

    def view(self, buffer: Tensor, param_shard: ParamShard) -> Tensor:
        """One of its parameters, in full, in `buffer` (end - start,)."""
        slot = self.flat.layout.slots[param_shard.number]
        return buffer[slot.start - self.start : slot.end - self.start].view(slot.shape)


def ranges_of(unit: Unit, limit: int) -> Iterator[ParamRange]:
    """The parameters of `unit` in ranges of at most `limit` bytes, or of one parameter."""
    for flat in unit.flats:
        param_shards: tuple[ParamShard, ...] = ()
        for index in range(len(flat.param_infos)):
            longer = ParamRange(flat, (*param_shards, ParamShard(flat, index)))
            if param_shards and longer.nbytes > limit:
                yield ParamRange(flat, param_shards)
                longer = ParamRange(flat, (ParamShard(flat, index),))
            param_shards = longer.param_shards
        if param_shards:
            yield ParamRange(flat, param_shards)


def memory_for(ranges: Sequence[ParamRange]) -> Tensor | None:
    """Bytes that hold any one of `ranges`: a new buffer for each leaves holes between what is kept, a third of a model in all."""
    if not ranges:
        return None
    return torch.empty(max(one.nbytes for one in ranges), dtype=torch.uint8, device=ranges[0].flat.device)


def gather_range(one: ParamRange, comm: Communicator, label: str, memory: Tensor | None = None) -> Tensor:
    """The range in full, on every rank: (end - start,), padding between parameters included. In `memory`, if given.

    Traffic and memory: its own size. Each rank that holds some of it sends that to all others.
    """
    buffer, chunk = one.empty(memory), one.flat.layout.shard_numel
    parts: list[tuple[int, Tensor]] = []
    for rank in range(one.start // chunk, -(-one.end // chunk)):
        low, high = max(one.start, rank * chunk), min(one.end, (rank + 1) * chunk)
        part = buffer[low - one.start : high - one.start]
        if rank == comm.rank:
            part.copy_(one.flat.shard[low - rank * chunk : high - rank * chunk])
        parts.append((rank, part))
    broadcast_all(parts, comm, label)
    return buffer


def broadcast_all(parts: Sequence[tuple[int, Tensor]], comm: Communicator, label: str) -> None:
    """Overwrite each contiguous tensor with that of the rank named beside it, and wait."""
    works = [comm.broadcast(t, source, label) for source, t in parts if t.numel()]
    for work in works:
        work.wait()
