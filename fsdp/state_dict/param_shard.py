"""One parameter of a unit, and the shard of it that this rank holds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.placement import Placement
from fsdp.params.shown_params import owning_unit
from fsdp.params.unit import Unit
from fsdp.shards.cut import Shape
from fsdp.shards.dtensors import here_of, local_of, local_of_full
from fsdp.shards.sharded_value import ShardedValue

HasGrad = Mapping[int, bool]
"""Whether a parameter has a gradient, by the id of the user's Parameter object."""


class ParamShard(NamedTuple):
    """Parameter `number` of a flat buffer."""

    flat: FlatBuffer
    number: int

    @property
    def placement(self) -> Placement:
        return self.flat.placements[self.number]

    @property
    def parameter(self) -> nn.Parameter:
        """The user's Parameter object, which holds this rank's shard."""
        return self.flat.sharded_params[self.number]

    @property
    def shape(self) -> Shape:
        """The shape of the full parameter."""
        return self.placement.shape

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor of the parameter's shape: a view."""
        return self.placement.part_of_full(full.detach())

    def overwrite(self, local: Tensor) -> None:
        """Copy `local`, which has the shape of this rank's shard, into the parameter. Autograd sees the change."""
        _overwrite(self.parameter, local)


def param_shards_of(unit: Unit) -> Iterator[ParamShard]:
    """Every parameter of `unit`, in the order of its flat buffers."""
    for flat in unit.flats:
        for index in range(len(flat.param_infos)):
            yield ParamShard(flat, index)


def param_shards_in(model: nn.Module) -> dict[int, ParamShard]:
    """The sharded parameters of `model`, by the id of the user's Parameter object."""
    units = {id(owner): owner for p in model.parameters() if isinstance(owner := owning_unit(p), Unit)}
    return {id(param_shard.parameter): param_shard for unit in units.values() for param_shard in param_shards_of(unit)}


def agree_on_gradients(units: Iterable[Unit], world_comm: Communicator, function_name: str) -> HasGrad:
    """Which parameters of `units` have a gradient on any rank. Communicates.

    Raises:
        ShardingError: on every rank; a parameter has a gradient on some of the ranks that hold elements of it.
    """
    param_shards = [param_shard for unit in units for param_shard in param_shards_of(unit)]
    # a rank without elements of a parameter that has some says nothing
    mine = [one.parameter.grad is not None if one.placement.part.numel or 0 in one.shape else None for one in param_shards]
    said = [*zip(*world_comm.gather_objects(mine, function_name), strict=True)]
    for param_shard, flags in zip(param_shards, said, strict=True):
        there, absent = ([rank for rank, flag in enumerate(flags) if flag is wanted] for wanted in (True, False))
        if there and absent:
            raise ShardingError(
                f"{function_name}: parameter {param_shard.placement.name!r} has a gradient on some ranks only (on {there}, not "
                f"on {absent}); set it to None on all ranks, or on none."
            )
    return {id(one.parameter): True in flags for one, flags in zip(param_shards, said, strict=True)}


def is_sharded(value: object) -> bool:
    """Whether a value of a state dict is this rank's part of a tensor."""
    return isinstance(value, ShardedValue) or local_of(value) is not None


def full_value(tensor: Tensor) -> Tensor:
    """The full value of a tensor that belongs to no unit. Communicates if it is a DTensor."""
    full: Tensor = tensor.full_tensor() if local_of(tensor) is not None else tensor  # type: ignore[attr-defined]
    return full


def load_value(tensor: Any, full: Tensor) -> None:
    """Copy the full value of a tensor that belongs to no unit into it, or this rank's part if it is a DTensor."""
    _overwrite(tensor, full if local_of(tensor) is None else local_of_full(full, tensor._spec))


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Overwrite a tensor, or this rank's part of a DTensor. Autograd sees the change."""
    here = here_of(tensor)
    here.copy_(values)
    if here is not tensor:
        increment_version(tensor)
