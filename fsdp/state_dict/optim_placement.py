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
from fsdp.state_dict.param_shard import Piece
from fsdp.state_dict.sharded_value import ShardedValue


class Kind(Enum):
    """What the ranks' tensors are parts of."""

    ELEMENTS = auto()
    """Of a tensor shaped like the parameter."""
    ROWS = auto()
    """Of one with as many rows, where the parameter is cut between rows."""
    WHOLE = auto()
    """Of nothing: one rank holds all of the parameter, and so all of its state; or every rank does (it is not sharded)."""
    EACH = auto()
    """Of nothing that could be put together: a statistic over this rank's rows, for example."""


class Spread(NamedTuple):
    """One tensor of the state of one parameter, over all ranks."""

    piece: Piece | None
    """None: the parameter is not sharded, and every rank has the whole tensor."""
    kind: Kind
    shape: Shape
    """In full. Of kind EACH: on each rank that holds some of the parameter."""
    dtype: torch.dtype

    def span(self, rank: int) -> tuple[int, int]:
        """The first element and the number of elements of the flattened full tensor that `rank` has."""
        if self.piece is None:
            return 0, prod(self.shape)
        part = self.piece.part_of(rank)
        if self.kind is Kind.ELEMENTS:
            return part.first, part.numel
        if self.kind is Kind.ROWS:
            row, mine = max(prod(self.piece.shape[1:]), 1), prod(self.shape[1:])
            return part.first // row * mine, part.numel // row * mine
        return 0, prod(self.shape) if part.numel else 0

    def local_shape(self, rank: int) -> Shape:
        """Of what `rank` has, which must be something."""
        if self.piece is None or self.kind in (Kind.WHOLE, Kind.EACH):
            return self.shape
        if self.kind is Kind.ELEMENTS:
            return self.piece.part_of(rank).shape
        return (self.span(rank)[1] // prod(self.shape[1:]), *self.shape[1:])

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """What `rank` has of a full tensor: a copy, so that the full one need not live on."""
        first, numel = self.span(rank)
        return full.detach().reshape(-1)[first : first + numel].view(self.local_shape(rank)).clone()

    def value(self, name: str, local: Tensor, rank: int) -> ShardedValue:
        """What `rank` has, for Distributed Checkpoint."""
        return ShardedValue(name, local, self.shape, self.span(rank)[0])


def spread_of(where: str, piece: Piece | None, shapes: Mapping[int, Shape], dtype: torch.dtype) -> Spread:
    """How a tensor with dimensions lies over the ranks that have it, by rank. `where`: what it is, for errors.

    Raises:
        ShardingError: some ranks that hold a part of the parameter have no such tensor.
    """
    if piece is None:
        return Spread(None, Kind.WHOLE, next(iter(shapes.values())), dtype)
    holders = piece.holders
    absent = [rank for rank in holders if rank not in shapes]
    if absent:
        raise ShardingError(f"{where} is missing on ranks {absent}, which hold a part of the parameter; step every rank alike.")
    held = [shapes[rank] for rank in holders]
    if len(holders) == 1:
        return Spread(piece, Kind.WHOLE, held[0], dtype)
    parts = [piece.part_of(rank).shape for rank in holders]
    if held == parts:
        return Spread(piece, Kind.ELEMENTS, piece.shape, dtype)
    rows = [(part[0], *shape[1:]) for part, shape in zip(parts, held, strict=True)]
    if _cut_between_rows(piece) and rows == held and len({shape[1:] for shape in held}) == 1 and 0 not in held[0]:
        return Spread(piece, Kind.ROWS, (piece.shape[0], *held[0][1:]), dtype)
    return Spread(piece, Kind.EACH, held[0], dtype)


def spread_from_full(where: str, piece: Piece | None, shape: Shape, dtype: torch.dtype) -> Spread:
    """How a full tensor of `shape` is to lie over the ranks.

    Raises:
        ShardingError: it is shaped neither like the parameter nor like a number for each row, and the parameter is cut.
    """
    if piece is None or len(piece.holders) <= 1:
        return Spread(piece, Kind.WHOLE, shape, dtype)
    if shape == piece.shape:
        return Spread(piece, Kind.ELEMENTS, shape, dtype)
    if _cut_between_rows(piece) and shape[:1] == piece.shape[:1] and 0 not in shape:
        return Spread(piece, Kind.ROWS, shape, dtype)
    raise ShardingError(
        f"{where} has shape {shape}, which cannot be cut like the parameter, whose shape is {piece.shape}: it is a statistic "
        "over more than one rank's part. Load it on one rank, or drop it from the state dict and let the optimizer start it anew."
    )


def _cut_between_rows(piece: Piece) -> bool:
    return len(piece.shape) > 1 and not piece.flat.layout.slots[piece.number].cut_by_element
