"""How one tensor of an optimizer's state is distributed over the ranks.

An optimizer makes its state from shards. Most tensors have the shape of the shard, some have one number for each of its rows,
some (a step count) are equal on all ranks, and some are statistics that have a meaning for that shard only.
"""

from collections.abc import Mapping
from enum import Enum, auto
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.errors import ShardingError
from fsdp.shards.cut import Shape
from fsdp.shards.shard_tensor import plain
from fsdp.shards.sharded_value import ShardedValue
from fsdp.state_dict.param_shard import ParamShard


class PlacementKind(Enum):
    """How the tensors of all ranks form one full tensor."""

    LIKE_PARAM = auto()
    """The full tensor has the parameter's shape, and is cut like the parameter."""
    BY_ROW = auto()
    """The full tensor has as many rows as the parameter, which is cut between rows; its rows are distributed alike."""
    UNSHARDED = auto()
    """The tensor is complete where it exists: on the one rank that holds the full parameter, or on every rank if the parameter
    is not sharded."""
    DTENSOR = auto()
    """The full tensor has the parameter's shape. Each rank's part is a DTensor, which knows where it lies."""
    PER_RANK = auto()
    """There is no full tensor: each rank's is a statistic over its own shard, for example."""


class StatePlacement(NamedTuple):
    """The placement of one tensor of one parameter's state."""

    param_shard: ParamShard | None
    """None: the parameter is not sharded, and every rank has the full tensor."""
    kind: PlacementKind
    shape: Shape
    """The shape of the full tensor; for PER_RANK, of the tensor on the first rank that holds elements of the parameter."""
    dtype: torch.dtype

    def span(self, rank: int) -> tuple[int, int]:
        """The first element and the number of elements that `rank` has of the flattened full tensor."""
        if self.param_shard is None:
            return 0, prod(self.shape)
        part = self.param_shard.part_of(rank)
        if self.kind is PlacementKind.LIKE_PARAM:
            return part.first, part.numel
        if self.kind is PlacementKind.BY_ROW:
            param_row, state_row = max(prod(self.param_shard.shape[1:]), 1), prod(self.shape[1:])
            return part.first // param_row * state_row, part.numel // param_row * state_row
        return 0, prod(self.shape) if part.numel else 0

    def local_shape(self, rank: int) -> Shape:
        """The shape of the tensor on `rank`, which must hold elements of the parameter."""
        if self.param_shard is None or self.kind in (PlacementKind.UNSHARDED, PlacementKind.PER_RANK):
            return self.shape
        if self.kind is PlacementKind.LIKE_PARAM:
            return self.param_shard.part_of(rank).shape
        return (self.span(rank)[1] // prod(self.shape[1:]), *self.shape[1:])

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """The part of a full tensor that belongs on `rank`, this one: a copy, so that the full tensor can be freed."""
        if self.param_shard is not None and self.kind is PlacementKind.DTENSOR:
            return self.param_shard.placement.as_shard(self.param_shard.cut(full).clone())
        first, numel = self.span(rank)
        return full.detach().reshape(-1)[first : first + numel].view(self.local_shape(rank)).clone()

    def value(self, name: str, local: Tensor, rank: int) -> Tensor:
        """`local`, the tensor on `rank`, as Distributed Checkpoint can save and load it."""
        return local if self.kind is PlacementKind.DTENSOR else ShardedValue(name, local, self.shape, self.span(rank)[0])

    def empty(self, name: str, rank: int, device: torch.device) -> Tensor:
        """New memory for the tensor on `rank`, this one, as Distributed Checkpoint can load it."""
        if self.param_shard is not None and self.kind is PlacementKind.DTENSOR:
            placement, like = self.param_shard.placement, plain(self.param_shard.parameter)
            return placement.as_shard(torch.empty_like(like, dtype=self.dtype, device=device))
        local = torch.empty(self.local_shape(rank), dtype=self.dtype, device=device)
        return local if self.kind is PlacementKind.UNSHARDED else self.value(name, local, rank)


def placement_of(where: str, param_shard: ParamShard | None, shapes: Mapping[int, Shape], dtype: torch.dtype) -> StatePlacement:
    """Infer the placement of a tensor from its shape on each rank that has it. Errors begin with `where`.

    Raises:
        ShardingError: a rank that holds a part of the parameter has no such tensor.
    """
    if param_shard is None:
        return StatePlacement(None, PlacementKind.UNSHARDED, next(iter(shapes.values())), dtype)
    if param_shard.is_dtensor:
        return StatePlacement(param_shard, PlacementKind.DTENSOR, next(iter(shapes.values())), dtype)
    holders = param_shard.holders
    absent = [rank for rank in holders if rank not in shapes]
    if absent:
        raise ShardingError(f"{where} is missing on ranks {absent}, which hold a part of the parameter; step every rank alike.")
    local = [shapes[rank] for rank in holders]
    if len(holders) == 1:
        return StatePlacement(param_shard, PlacementKind.UNSHARDED, local[0], dtype)
    parts = [param_shard.part_of(rank).shape for rank in holders]
    if local == parts:
        return StatePlacement(param_shard, PlacementKind.LIKE_PARAM, param_shard.shape, dtype)
    with_rows = [(part[0], *shape[1:]) for part, shape in zip(parts, local, strict=True)]
    alike = len({shape[1:] for shape in local}) == 1
    if _cut_between_rows(param_shard) and with_rows == local and alike and 0 not in local[0]:
        return StatePlacement(param_shard, PlacementKind.BY_ROW, (param_shard.shape[0], *local[0][1:]), dtype)
    return StatePlacement(param_shard, PlacementKind.PER_RANK, local[0], dtype)


def placement_from_full(where: str, param_shard: ParamShard | None, shape: Shape, dtype: torch.dtype) -> StatePlacement:
    """Choose the placement of a full tensor of `shape`. Errors begin with `where`.

    Raises:
        ShardingError: the parameter is cut, and the tensor has neither its shape nor its number of rows.
    """
    is_dtensor = param_shard is not None and param_shard.is_dtensor
    if param_shard is None or (len(param_shard.holders) <= 1 and not is_dtensor):
        return StatePlacement(param_shard, PlacementKind.UNSHARDED, shape, dtype)
    if shape == param_shard.shape:
        return StatePlacement(param_shard, PlacementKind.DTENSOR if is_dtensor else PlacementKind.LIKE_PARAM, shape, dtype)
    if not is_dtensor and _cut_between_rows(param_shard) and shape[:1] == param_shard.shape[:1] and 0 not in shape:
        return StatePlacement(param_shard, PlacementKind.BY_ROW, shape, dtype)
    raise ShardingError(
        f"{where} has shape {shape}, which cannot be cut like the parameter, whose shape is {param_shard.shape}: it is a "
        "statistic over more than one rank's part. Load it on one rank, or drop it from the state dict "
        "and let the optimizer start it anew."
    )


def _cut_between_rows(param_shard: ParamShard) -> bool:
    return len(param_shard.shape) > 1 and not param_shard.flat.layout.slots[param_shard.number].cut_by_element
