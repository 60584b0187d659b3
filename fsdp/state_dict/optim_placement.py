"""How one tensor of an optimizer's state lies over the ranks.

An optimizer sees shards, so it makes its state from them: most tensors have the shard's shape, some a number for each
row of it, some (a step count) are the same everywhere, and some mean nothing without the shard they were made from.
"""

from collections.abc import Mapping
from enum import Enum, auto
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.errors import ShardingError
from fsdp.params.layout import Shape
from fsdp.state_dict.param_shard import ParamShard
from fsdp.state_dict.sharded_value import ShardedValue


class PlacementKind(Enum):
    """What the ranks' tensors are parts of."""

    LIKE_PARAM = auto()
    """Of a tensor shaped like the parameter."""
    BY_ROW = auto()
    """Of one with as many rows, where the parameter is cut between rows."""
    UNSHARDED = auto()
    """Of nothing: one rank holds all of the parameter, and so all of its state; or every rank does (it is not sharded)."""
    PER_RANK = auto()
    """Of nothing that could be put together: a statistic over this rank's rows, for example."""


class StatePlacement(NamedTuple):
    """One tensor of the state of one parameter, over all ranks."""

    param_shard: ParamShard | None
    """None: the parameter is not sharded, and every rank has the whole tensor."""
    kind: PlacementKind
    shape: Shape
    """In full. Of kind EACH: on each rank that holds some of the parameter."""
    dtype: torch.dtype

    def span(self, rank: int) -> tuple[int, int]:
        """The first element and the number of elements of the flattened full tensor that `rank` has."""
        if self.param_shard is None:
            return 0, prod(self.shape)
        part = self.param_shard.part_of(rank)
        if self.kind is PlacementKind.LIKE_PARAM:
            return part.first, part.numel
        if self.kind is PlacementKind.BY_ROW:
            row, mine = max(prod(self.param_shard.shape[1:]), 1), prod(self.shape[1:])
            return part.first // row * mine, part.numel // row * mine
        return 0, prod(self.shape) if part.numel else 0

    def local_shape(self, rank: int) -> Shape:
        """Of what `rank` has, which must be something."""
        if self.param_shard is None or self.kind in (PlacementKind.UNSHARDED, PlacementKind.PER_RANK):
            return self.shape
        if self.kind is PlacementKind.LIKE_PARAM:
            return self.param_shard.part_of(rank).shape
        return (self.span(rank)[1] // prod(self.shape[1:]), *self.shape[1:])

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """What `rank` has of a full tensor: a copy, so that the full one need not live on."""
        first, numel = self.span(rank)
        return full.detach().reshape(-1)[first : first + numel].view(self.local_shape(rank)).clone()

    def value(self, name: str, local: Tensor, rank: int) -> ShardedValue:
        """What `rank` has, for Distributed Checkpoint."""
        return ShardedValue(name, local, self.shape, self.span(rank)[0])


def placement_of(where: str, param_shard: ParamShard | None, shapes: Mapping[int, Shape], dtype: torch.dtype) -> StatePlacement:
    """How a tensor with dimensions lies over the ranks that have it, by rank. `where`: what it is, for errors.

    Raises:
        ShardingError: some ranks that hold a part of the parameter have no such tensor.
    """
    if param_shard is None:
        return StatePlacement(None, PlacementKind.UNSHARDED, next(iter(shapes.values())), dtype)
    holders = param_shard.holders
    absent = [rank for rank in holders if rank not in shapes]
    if absent:
        raise ShardingError(f"{where} is missing on ranks {absent}, which hold a part of the parameter; step every rank alike.")
    held = [shapes[rank] for rank in holders]
    if len(holders) == 1:
        return StatePlacement(param_shard, PlacementKind.UNSHARDED, held[0], dtype)
    parts = [param_shard.part_of(rank).shape for rank in holders]
    if held == parts:
        return StatePlacement(param_shard, PlacementKind.LIKE_PARAM, param_shard.shape, dtype)
    rows = [(part[0], *shape[1:]) for part, shape in zip(parts, held, strict=True)]
    if _cut_between_rows(param_shard) and rows == held and len({shape[1:] for shape in held}) == 1 and 0 not in held[0]:
        return StatePlacement(param_shard, PlacementKind.BY_ROW, (param_shard.shape[0], *held[0][1:]), dtype)
    return StatePlacement(param_shard, PlacementKind.PER_RANK, held[0], dtype)


def placement_from_full(where: str, param_shard: ParamShard | None, shape: Shape, dtype: torch.dtype) -> StatePlacement:
    """How a full tensor of `shape` is to lie over the ranks.

    Raises:
        ShardingError: it is shaped neither like the parameter nor like a number for each row, and the parameter is cut.
    """
    if param_shard is None or len(param_shard.holders) <= 1:
        return StatePlacement(param_shard, PlacementKind.UNSHARDED, shape, dtype)
    if shape == param_shard.shape:
        return StatePlacement(param_shard, PlacementKind.LIKE_PARAM, shape, dtype)
    if _cut_between_rows(param_shard) and shape[:1] == param_shard.shape[:1] and 0 not in shape:
        return StatePlacement(param_shard, PlacementKind.BY_ROW, shape, dtype)
    raise ShardingError(
        f"{where} has shape {shape}, which cannot be cut like the parameter, whose shape is {param_shard.shape}: it is a "
        "statistic over more than one rank's part. Load it on one rank, or drop it from the state dict "
        "and let the optimizer start it anew."
    )


def _cut_between_rows(param_shard: ParamShard) -> bool:
    return len(param_shard.shape) > 1 and not param_shard.flat.layout.slots[param_shard.number].cut_by_element
