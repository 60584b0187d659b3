"""Full parameters of units, gathered from all ranks in ranges of their flat buffers, with bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

import torch
from torch import Tensor

from fsdp.comm.exchanges import broadcast_all
from fsdp.params.unit import Unit
from fsdp.state_dict.param_shard import ParamShard, param_shards_of

RANGE_BYTES: Final = 32 << 20
"""The limit for a range of several parameters, unless the user gives another one."""
ParamRange = Sequence[ParamShard]
"""Neighbouring parameters of one flat buffer."""


def ranges_of(unit: Unit, limit: int = RANGE_BYTES) -> Iterator[ParamRange]:
    """The parameters of `unit` in ranges of at most `limit` bytes, or of one parameter."""
    for _, param_shards in groupby(param_shards_of(unit), lambda one: id(one.flat)):
        found: list[ParamShard] = []
        for param_shard in param_shards:
            if found and _nbytes([found[0], param_shard]) > limit:
                yield found
                found = []
            found.append(param_shard)
        yield found


def gather_range(
    param_range: ParamRange, label: str, memory: Tensor | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[ParamShard, Tensor]]:
    """Gather a range on every rank; yield its parameters with their full values, which are views of one buffer if they can be.

    `memory`: bytes to gather into; None: new ones. `dtype`: to which the buffer is converted.

    Traffic and memory: the size of the range. Each rank that holds elements of it sends them to all others.
    """
    flat, start = param_range[0].flat, param_range[0].placement.extent.start
    if memory is None:
        memory = torch.empty(_nbytes(param_range), dtype=torch.uint8, device=flat.device)
    buffer = memory[: _nbytes(param_range)].view(flat.shard.dtype)
    spans: list[tuple[int, int, int]] = []
    for placement in [one.placement for one in param_range]:
        begin, part = placement.extent.start - start, placement.part
        buffer[begin + part.first : begin + part.first + part.numel] = flat.shard[part.offset : part.offset + part.numel]
        spans += [(rank, begin + first, begin + first + numel) for rank, first, numel in placement.cut.spans() if numel]
    # neighbours on one rank are sent together
    runs = [(rank, [*run]) for rank, run in groupby(spans, itemgetter(0))]
    broadcast_all([(rank, buffer[run[0][1] : run[-1][2]]) for rank, run in runs], flat.comm, label)
    buffer = buffer.to(dtype or buffer.dtype)
    for param_shard in param_range:
        extent = param_shard.placement.extent
        # which may communicate
        yield param_shard, param_shard.placement.full_of(buffer[extent.start - start : extent.end - start].view(extent.shape))


def full_params(units: Iterable[Unit]) -> Iterator[tuple[ParamShard, Tensor]]:
    """The parameters of `units` with their full values, as soon as their range is gathered. The next range overwrites them.

    One buffer for all: new memory for each range left holes between tensors that are kept, a third of a model in all.
    """
    ranges = [(unit, found) for unit in units for found in ranges_of(unit)]
    if not ranges:
        return
    memory = torch.empty(max(_nbytes(one) for _, one in ranges), dtype=torch.uint8, device=ranges[0][1][0].flat.device)
    for unit, param_range in ranges:
        yield from gather_range(param_range, unit.name, memory)


def _nbytes(param_range: ParamRange) -> int:
    """The bytes of a range, with the padding between parameters."""
    numel = param_range[-1].placement.extent.end - param_range[0].placement.extent.start
    return numel * param_range[0].flat.shard.element_size()
