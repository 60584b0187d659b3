"""Ranges of a unit's unsharded flat buffer, gathered from all ranks or broadcast from one, with bounded memory."""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fsdp.comm.joint_gather import broadcast_all
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.unit import Unit
from fsdp.state_dict.param_shard import ParamShard

RANGE_BYTES: Final = 32 << 20
"""The limit for a range of several parameters, unless the user gives another one."""


class ParamRange(NamedTuple):
    """Neighbouring parameters of one flat buffer: its elements `start` to `end`, unsharded."""

    param_shards: tuple[ParamShard, ...]

    @property
    def flat(self) -> FlatBuffer:
        return self.param_shards[0].flat

    @property
    def start(self) -> int:
        return self.param_shards[0].placement.extent.start

    @property
    def end(self) -> int:
        return self.param_shards[-1].placement.extent.end

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.flat.shard.element_size()

    def empty(self) -> Tensor:
        """A buffer (end - start,) in the parameters' own dtype."""
        return torch.empty(self.end - self.start, dtype=self.flat.shard.dtype, device=self.flat.device)

    def full_param(self, buffer: Tensor, param_shard: ParamShard) -> Tensor:
        """One full parameter of the range: a view of `buffer` (end - start,), or a copy that is gathered, see `Placement`."""
        extent = param_shard.placement.extent
        return param_shard.placement.full_of(buffer[extent.start - self.start : extent.end - self.start].view(extent.shape))


def ranges_of(unit: Unit, limit: int = RANGE_BYTES) -> Iterator[ParamRange]:
    """The parameters of `unit` in ranges of at most `limit` bytes, or of one parameter."""
    for flat in unit.flats:
        param_shards: tuple[ParamShard, ...] = ()
        for index in range(len(flat.param_infos)):
            longer = ParamRange((*param_shards, ParamShard(flat, index)))
            if param_shards and longer.nbytes > limit:
                yield ParamRange(param_shards)
                longer = ParamRange((ParamShard(flat, index),))
            param_shards = longer.param_shards
        yield ParamRange(param_shards)


def gather_range(param_range: ParamRange, label: str, buffer: Tensor) -> Tensor:
    """Gather a range on every rank into `buffer` (end - start,), with the padding between parameters. Returns it.

    Traffic and memory: the size of the range. Each rank that holds elements of it sends them to all others.
    """
    start, flat = param_range.start, param_range.flat
    parts: list[tuple[int, Tensor]] = []
    for run in flat.layout.runs(start, param_range.end):
        part = buffer[run.start - start : run.start - start + run.numel]
        if run.rank == flat.rank:
            part.copy_(flat.shard[run.offset : run.offset + run.numel])
        parts.append((run.rank, part))
    broadcast_all(parts, flat.comm, label)
    return buffer


def gather_ranges(units: Iterable[Unit]) -> Iterator[tuple[ParamRange, Tensor]]:
    """The ranges of `units`, each as soon as it is gathered, see `gather_range`. The next one overwrites it.

    One buffer for all: new memory for each range left holes between tensors that are kept, a third of a model in all.
    """
    ranges = [(unit, found) for unit in units for found in ranges_of(unit)]
    if not ranges:
        return
    memory = torch.empty(max(one.nbytes for _, one in ranges), dtype=torch.uint8, device=ranges[0][1].flat.device)
    for unit, param_range in ranges:
        buffer = memory[: param_range.nbytes].view(param_range.flat.shard.dtype)
        yield param_range, gather_range(param_range, unit.name, buffer)
