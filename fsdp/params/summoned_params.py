"""The full parameters of a unit inside `summon_full_params`."""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.comm.communicator import Communicator
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.param_info import ParamInfo
from fsdp.shards.shard_parameter import exchange


class FullParams:
    """The full parameters of one unit, in memory of their own and in the dtype of the shards.

    Between `gather` and `free` the user's Parameter objects are them.
    """

    __slots__ = ("_buffers", "_exchanged", "_flats")

    def __init__(self, flats: Sequence[FlatBuffer]) -> None:
        self._flats = flats
        self._buffers: list[Tensor] = []
        self._exchanged: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Each of the user's Parameter objects, with the object that is the shard meanwhile, and has its gradient."""

    @property
    def is_gathered(self) -> bool:
        """Whether the user's Parameter objects are full parameters."""
        return bool(self._buffers)

    @torch.no_grad()
    def gather(self, comm: Communicator, unit: str, tracker: MemoryTracker) -> None:
        """Gather the parameters and turn the user's Parameter objects into them.

        Memory: W * C elements of the shards' dtype, until `free`.
        """
        for flat in self._flats:
            buffer = flat.gather_copy(flat.shard.dtype, comm, unit)
            tracker.add("lent", size_of(buffer))
            self._buffers.append(buffer)
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            for parameter, slot in zip(flat.sharded_params, flat.layout.slots, strict=True):
                full = nn.Parameter(buffer[slot.start : slot.end].view(slot.shape).data, parameter.requires_grad)
                exchange(parameter, full)
                self._exchanged.append((parameter, full))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of the full parameters into the shards.

        Raises:
            ShardingError: a parameter points at a tensor of another shape or dtype. Nothing was copied.
        """
        views = list(self._views())
        for info, view in views:
            current = info.parameter
            if current.shape != view.shape or current.dtype != view.dtype:
                raise ShardingError(
                    f"parameter {info.names[0]!r} became {tuple(current.shape)}, {current.dtype} inside summon_full_params; "
                    f"it is {tuple(view.shape)}, {view.dtype}. Copy into it instead."
                )
        for info, view in views:
            if info.parameter.data_ptr() != view.data_ptr():
                view.copy_(info.parameter.detach())
        shards = iter([shard for _, shard in self._exchanged])
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            flat.set_shard(flat.local_chunk(buffer), list(islice(shards, len(flat.param_infos))))
        for parameter, shard in self._exchanged:
            if parameter._version:
                increment_version(shard)

    @torch.no_grad()
    def free(self, tracker: MemoryTracker) -> None:
        """Turn the user's Parameter objects into the shards again and drop the full parameters. Idempotent."""
        for parameter, shard in self._exchanged:
            exchange(parameter, shard)
        for buffer in self._buffers:
            tracker.add("lent", -size_of(buffer))
        self._buffers, self._exchanged = [], []

    def _views(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Each parameter with its place in the gathered buffers."""
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            for info, slot in zip(flat.param_infos, flat.layout.slots, strict=True):
                yield info, buffer[slot.start : slot.end].view(slot.shape)
