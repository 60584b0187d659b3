"""The full parameters of a unit inside `summon_full_params`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp.comm.communicator import Communicator
from fsdp.device.storage import MemoryTracker, size_of
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.param_info import ParamInfo


class FullParams:
    """The full parameters of one unit, in memory of their own and in the dtype of the shards.

    Between `gather` and `free` the user's Parameter objects point at them.
    """

    __slots__ = ("_buffers", "_flats", "_saved_grads")

    def __init__(self, flats: Sequence[FlatBuffer]) -> None:
        self._flats = flats
        self._buffers: list[Tensor] = []
        self._saved_grads: list[Tensor | None] = []
        """The gradients that the parameters had before `gather`, in the order of the parameters."""

    @property
    def is_gathered(self) -> bool:
        """Whether the user's Parameter objects point at full parameters."""
        return bool(self._buffers)

    @torch.no_grad()
    def gather(self, comm: Communicator, unit: str, tracker: MemoryTracker) -> None:
        """Gather the parameters and point the user's Parameter objects at them.

        Memory: W * C elements of the shards' dtype, until `free`.
        """
        for flat in self._flats:
            buffer = flat.gather_copy(flat.shard.dtype, comm, unit)
            tracker.add("lent", size_of(buffer))
            self._buffers.append(buffer)
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            for parameter, slot in zip(flat.sharded_params, flat.layout.slots, strict=True):
                self._saved_grads.append(parameter.grad)
                parameter.grad = None
                parameter.data = buffer[slot.start : slot.end].view(slot.shape).data

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
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            flat.shard.copy_(flat.local_chunk(buffer))

    @torch.no_grad()
    def free(self, tracker: MemoryTracker) -> None:
        """Point the user's Parameter objects at the shards again and drop the full parameters. Idempotent."""
        saved_grads = iter(self._saved_grads)
        # a failed `gather` leaves fewer buffers than flat buffers
        for flat, buffer in zip(self._flats, self._buffers, strict=False):
            tracker.add("lent", -size_of(buffer))
            for parameter, part in zip(flat.sharded_params, flat.parts, strict=True):
                parameter.grad = None
                parameter.data = flat.shard_view(part).data
                parameter.grad = next(saved_grads, None)
        self._buffers, self._saved_grads = [], []

    def _views(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Each parameter with its place in the gathered buffers."""
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            for info, slot in zip(flat.param_infos, flat.layout.slots, strict=True):
                yield info, buffer[slot.start : slot.end].view(slot.shape)
