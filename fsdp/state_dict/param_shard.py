"""One parameter of a unit, and the shard of it that this rank holds."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.layout import ShardExtent
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.shards.cut import Shape
from fsdp.shards.dtensors import local_of
from fsdp.shards.shard_tensor import plain
from fsdp.shards.sharded_value import ShardedValue


class ParamShard(NamedTuple):
    """Parameter `number` of a flat buffer."""

    flat: FlatBuffer
    number: int

    @property
    def parameter(self) -> nn.Parameter:
        """The user's Parameter object, which holds this rank's shard."""
        return self.flat.sharded_params[self.number]

    @property
    def shape(self) -> Shape:
        """The shape of the full parameter."""
        layouts = self.flat.dtensor_layouts
        if layouts is not None:
            return tuple(layouts[self.number].shape)
        return self.flat.layout.slots[self.number].shape

    @property
    def part(self) -> ShardExtent:
        """The elements that this rank holds."""
        return self.flat.parts[self.number]

    def part_of(self, rank: int) -> ShardExtent:
        """The elements that `rank` holds."""
        return self.flat.layout.part(self.number, rank)

    @property
    def holders(self) -> range:
        """The ranks that hold elements of the parameter."""
        return self.flat.layout.holders(self.number)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor of the parameter's shape: a view."""
        return self.flat.local_part(self.number, full.detach())

    def overwrite(self, local: Tensor) -> None:
        """Copy `local`, which has the shape of this rank's shard, into the parameter. Autograd sees the change."""
        part = local_of(self.parameter)
        if part is None:
            self.parameter.copy_(local)
        else:
            part.copy_(local)
            increment_version(self.parameter)

    def value(self, name: str, local: Tensor) -> ShardedValue:
        """`local`, which has the shape of this rank's shard, as this rank's part of a tensor shaped like the parameter."""
        if not self.flat.is_row_range(self.number):
            raise ShardingError(
                f"{name!r} is cut along another dimension than the first, or by tensor parallelism as well: its part is no range "
                "of rows. Use torch's functions for state dicts."
            )
        empty = 0 in self.shape and self.flat.rank == 0
        return ShardedValue(name, plain(local), self.shape, self.part.first, empty)

    def local_part(self, operation: str, name: str, given: Any) -> Tensor:
        """This rank's part of `given`, which is the full tensor or already this part. Errors begin with `operation`.

        Raises:
            ShardingError: `given` has another shape, or a dtype whose conversion would lose something, or is another part.
        """
        layouts = self.flat.dtensor_layouts
        part = None if layouts is None else local_of(given)
        if layouts is not None and part is not None and layouts[self.number].fits(given):
            return part
        if given is self.parameter:
            # torch's set_model_state_dict gives the model its own parameters under names that are missing
            return plain(given)
        check_fit(operation, name, given, self.shape, self.parameter.dtype)
        if self.flat.is_tensor_parallel(self.number):
            raise ShardingError(
                f"{operation}: {name!r} is cut by tensor parallelism as well, and this value is no DTensor; load it by torch's "
                "set_model_state_dict."
            )
        if not isinstance(given, ShardedValue):
            return self.cut(given)
        if not self.value(name, self.parameter).cut_like(given):
            raise ShardingError(
                f"{operation}: {name!r} was cut in another way than this model's (other ranks, or other units): save it with "
                "fsdp.save and load it with fsdp.load, which cut it anew, or give the full value."
            )
        return given.local


def param_shards_of(unit: Unit) -> Iterator[ParamShard]:
    """Every parameter of `unit`, in the order of its flat buffers."""
    for flat in unit.flats:
        for index in range(len(flat.param_infos)):
            yield ParamShard(flat, index)


def param_shards_in(model: nn.Module) -> dict[int, ParamShard]:
    """The sharded parameters of `model`, by the id of the user's Parameter object."""
    units = {id(owner): owner for p in model.parameters() if isinstance(owner := owning_unit(p), Unit)}
    return {id(param_shard.parameter): param_shard for unit in units.values() for param_shard in param_shards_of(unit)}


def check_fit(operation: str, name: str, given: object, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return `given`, which can be loaded into a tensor of `shape` and `dtype` without loss. Errors begin with `operation`.

    Raises:
        ShardingError: `given` is no tensor, or has another shape, or a dtype that holds more than `dtype`.
    """
    if not isinstance(given, Tensor):
        raise ShardingError(f"{operation}: {name!r} is {type(given).__name__}, not a tensor.")
    if callable(getattr(given, "full_tensor", None)):
        raise ShardingError(f"{operation}: {name!r} is a {type(given).__name__}: give what its full_tensor() returns.")
    if tuple(given.shape) != shape:
        raise ShardingError(f"{operation}: {name!r} has shape {tuple(given.shape)}, the model has {shape}.")
    if given.dtype != dtype and (_kind(given.dtype) != _kind(dtype) or torch.promote_types(given.dtype, dtype) != dtype):
        raise ShardingError(
            f"{operation}: {name!r} is {given.dtype}, the model has {dtype}, which would lose some of it; convert it first: "
            f".to({dtype})."
        )
    return given


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
