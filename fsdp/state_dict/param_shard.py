"""One parameter of a unit, and what this rank holds of it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.errors import ShardingError
from fsdp.params.flat_buffer import FlatBuffer
from fsdp.params.layout import Part, Shape
from fsdp.params.module_params import owner_of
from fsdp.params.unit import Unit
from fsdp.state_dict.sharded_value import ShardedValue


class Piece(NamedTuple):
    """Parameter `number` of a flat buffer."""

    flat: FlatBuffer
    number: int

    @property
    def parameter(self) -> nn.Parameter:
        """The user's Parameter object: this rank's part."""
        return self.flat.shard_parameters[self.number]

    @property
    def shape(self) -> Shape:
        """Of the full parameter."""
        return self.flat.layout.slots[self.number].shape

    @property
    def part(self) -> Part:
        """What this rank holds."""
        return self.flat.parts[self.number]

    def part_of(self, rank: int) -> Part:
        """What another rank holds."""
        return self.flat.layout.part(self.number, rank)

    @property
    def holders(self) -> range:
        """The ranks that hold some of it."""
        slot, chunk = self.flat.layout.slots[self.number], self.flat.layout.chunk
        return range(slot.start // chunk, -(-slot.end // chunk) if slot.numel else slot.start // chunk)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor of the parameter's shape."""
        part = self.part
        return full.detach().reshape(-1)[part.first : part.first + part.numel].view(part.shape)

    def value(self, name: str, local: Tensor) -> ShardedValue:
        """`local`, shaped as this rank's part, as a part of something that is shaped like the parameter."""
        empty = 0 in self.shape and self.flat.rank == 0
        return ShardedValue(name, local, self.shape, self.part.first, empty)

    def local_part(self, asker: str, name: str, given: Tensor) -> Tensor:
        """This rank's part of what a user gave: the full tensor, or this very part of it.

        Raises:
            ShardingError: it has another shape, a dtype that would lose something, or was cut in another way.
        """
        check_fit(asker, name, given, self.shape, self.parameter.dtype)
        if not isinstance(given, ShardedValue):
            return self.cut(given)
        if not self.value(name, self.parameter.detach()).cut_like(given):
            raise ShardingError(
                f"{asker}: {name!r} was cut in another way than this model's (other ranks, or other units): save it with "
                "fsdp.save and load it with fsdp.load, which cut it anew, or give the full value."
            )
        return given.local


def pieces_of(unit: Unit) -> Iterator[Piece]:
    """Every parameter of `unit`, in the order of its places."""
    for flat in unit.flats:
        for index in range(len(flat.places)):
            yield Piece(flat, index)


def pieces_in(model: nn.Module) -> dict[int, Piece]:
    """The pieces of `model`, by the id of the user's Parameter object."""
    units = {id(owner): owner for p in model.parameters() if isinstance(owner := owner_of(p), Unit)}
    return {id(piece.parameter): piece for unit in units.values() for piece in pieces_of(unit)}


def check_fit(asker: str, name: str, given: Any, shape: Shape, dtype: torch.dtype) -> None:
    """Whether `given` can be loaded into a tensor of `shape` and `dtype` without loss.

    Raises:
        ShardingError: it is no tensor, or has another shape, or a dtype that holds more than `dtype`.
    """
    if not isinstance(given, Tensor):
        raise ShardingError(f"{asker}: {name!r} is {type(given).__name__}, not a tensor.")
    if callable(getattr(given, "full_tensor", None)):
        raise ShardingError(f"{asker}: {name!r} is a {type(given).__name__}: give what its full_tensor() returns.")
    if tuple(given.shape) != shape:
        raise ShardingError(f"{asker}: {name!r} has shape {tuple(given.shape)}, the model has {shape}.")
    if given.dtype != dtype and (_kind(given.dtype) != _kind(dtype) or torch.promote_types(given.dtype, dtype) != dtype):
        raise ShardingError(
            f"{asker}: {name!r} is {given.dtype}, the model has {dtype}, which would lose some of it; convert it first: "
            f".to({dtype})."
        )


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex
