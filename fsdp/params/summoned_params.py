"""The full parameters of a unit inside `summon_full_params`."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.device.storage import MemoryTracker, size_of
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.placement import Placement
from fsdp.shards.dtensors import is_replaced
from fsdp.shards.shard_parameter import exchange, summoned
from fsdp.shards.shard_tensor import plain


class _Full(NamedTuple):
    """One full parameter."""

    parameter: nn.Parameter
    shard: nn.Parameter
    """The other of two objects, of which one is the user's."""
    placement: Placement
    view: Tensor
    """Where the values lie, unless the user has put them elsewhere."""
    address: int
    """Its `_address`."""


class FullParams:
    """The full parameters of one unit, in memory of their own and in the dtype of the shards.

    Between `gather` and `free` the user's Parameter objects are them. Where shards are DTensors, they are objects of their own,
    which the modules show: a DTensor cannot become an ordinary tensor.
    """

    __slots__ = ("_buffers", "_flats", "_gathered", "in_place_of")

    def __init__(self, flats: Sequence[FlatBuffer]) -> None:
        self._flats = flats
        self._buffers: list[Tensor] = []
        self._gathered: list[_Full] = []
        self.in_place_of: dict[int, nn.Parameter] = {}
        """Those that are objects of their own, by the id of the shard."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather(self, unit: str, tracker: MemoryTracker) -> None:
        """Gather the parameters, and turn the user's Parameter objects into them where they can become them.

        Memory: W * C elements of the shards' dtype, until `free`.
        """
        for flat in self._flats:
            buffer = flat.gather_copy(flat.shard.dtype, unit)
            tracker.add("lent", size_of(buffer))
            self._buffers.append(buffer)
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            for parameter, placement in zip(flat.sharded_params, flat.placements, strict=True):
                summoned[parameter] = placement.name
                view = placement.full_in(buffer)
                full = nn.Parameter(view.data, parameter.requires_grad)
                address = _address(placement, full)
                if placement.replaces_param:
                    self.in_place_of[id(parameter)] = full
                    self._gathered.append(_Full(full, parameter, placement, view, address))
                else:
                    exchange(parameter, full)
                    self._gathered.append(_Full(parameter, full, placement, view, address))

    @torch.no_grad()
    def check(self) -> None:
        """Raise ShardingError if a parameter points at a tensor of another shape or dtype, which no shard could take."""
        for full, _, placement, view, address in self._gathered:
            fits = full.shape == view.shape and full.dtype == view.dtype
            if not fits or _address(placement, full) != address:
                what = "a DTensor, whose values are in its local tensor" if fits else f"{tuple(view.shape)}, {view.dtype}"
                raise ShardingError(
                    f"parameter {placement.name!r} became {tuple(full.shape)}, {full.dtype} inside summon_full_params by "
                    f"`.data = x`; it is {what}. Copy into it instead."
                )

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy this rank's part of the full parameters, which `check` has accepted, into the shards."""
        for one in self._gathered:
            now, before = plain(one.parameter), plain(one.view)
            if now.data_ptr() != before.data_ptr():
                before.copy_(now)
        shards = iter([one.shard for one in self._gathered])
        for flat, buffer in zip(self._flats, self._buffers, strict=True):
            flat.set_shard(flat.own_chunk(buffer), list(islice(shards, len(flat.param_infos))))
        for one in self._gathered:
            if one.parameter._version or id(one.shard) in self.in_place_of:
                increment_version(one.shard)

    @torch.no_grad()
    def free(self, tracker: MemoryTracker) -> None:
        """Turn the user's Parameter objects into the shards again and drop the full parameters. Idempotent."""
        for parameter in (parameter for flat in self._flats for parameter in flat.sharded_params):
            summoned.pop(parameter, None)  # type: ignore[no-untyped-call]
        for full, shard, *_ in self._gathered:
            if id(shard) in self.in_place_of:
                is_replaced(full, "was made inside summon_full_params, of parameters that existed there alone: make it outside.")
            else:
                exchange(full, shard)
        for buffer in self._buffers:
            tracker.add("lent", -size_of(buffer))
        self._buffers, self._gathered, self.in_place_of = [], [], {}


def _address(placement: Placement, full: nn.Parameter) -> int:
    """Where a full parameter that is a DTensor lies: `.data = x` changes that, and not its values. 0 for any other."""
    return placement.address(full) if placement.is_tensor_parallel else 0
