"""What a shard is a part of: the parameter, its full shape, and which ranks hold which elements."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from fsdp.comm.communicator import Communicator
from fsdp.errors import ShardingError
from fsdp.shards.cut import Cut, Shape, part_shape
from fsdp.shards.state_placement import StatePlacement, place_local


class ShardInfo(NamedTuple):
    """One parameter as it is cut over the ranks. The parameter, its gradient and its optimizer state share one of these."""

    name: str
    """The fully qualified name of the parameter."""
    cut: Cut
    local_shape: Size
    """The shape of this rank's part. Cut between rows: (k, *rest). Cut inside a row: (1, ..., 1, n)."""
    first: int
    """The first element of this rank's part, counted from the start of the flattened tensor."""
    numel: int
    """The number of elements of the full tensor."""
    cut_by_element: bool
    """Whether a row of the tensor may lie on two ranks."""
    comm: Communicator
    """The communicator of the ranks that hold the parts."""
    viewed_from: "ShardInfo | None" = None
    """The shard of which this is a view of another shape, so that a view of that shape is cut as it was."""

    @property
    def shape(self) -> Shape:
        """The shape of the full tensor."""
        return self.cut.shape

    def describe(self) -> str:
        """The shard in words, for an error. Of a view, it is what was viewed."""
        origin = self.viewed_from or self
        return f"{self.name!r}, of which this rank holds {tuple(origin.local_shape)} of {origin.shape}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardInfo":
        return self

    def check_same_cut(self, other: "ShardInfo", operation: str) -> None:
        """Raise ShardingError unless `other` holds the same elements on every rank."""
        if self.cut != other.cut:
            raise ShardingError(
                f"{operation}: {self.name!r} and {other.name!r} are cut over the ranks in different ways, so their parts do not "
                "hold the same elements: compute with the full values, inside fsdp.summon_full_params(model, writeback=True)."
            )

    def of_rows(self, local_shape: Size) -> "ShardInfo":
        """The shard with as many rows as this one, and `local_shape` on this rank."""
        rest = tuple(local_shape[1:])
        first = self.first // self.cut.row * prod(rest)
        return self._replace(
            cut=self.cut.of_rows(rest),
            local_shape=local_shape,
            first=first,
            numel=self.shape[0] * prod(rest),
            cut_by_element=False,
            viewed_from=None,
        )

    def viewed(self, shape: Shape) -> "ShardInfo | None":
        """The shard of a tensor of `shape` with the same elements in the same order; None if the number of elements differs."""
        origin = self.viewed_from or self
        if shape in (self.shape, origin.shape):
            return self if shape == self.shape else origin
        if prod(shape) != self.numel or not self.numel:
            return None
        cut, here = self.cut._replace(shape=shape), self.local_shape.numel()
        # one row is cut by element, even if it lies on one rank: what is computed over it is wanted on all ranks
        by_element = self.cut_by_element or shape[:1] == (1,) or cut.by_element
        local_shape = Size(part_shape(shape, here, by_element))
        return self._replace(cut=cut, local_shape=local_shape, cut_by_element=by_element, viewed_from=origin)

    def place_state(self, where: str, shapes: Mapping[int, Shape], dtype: torch.dtype) -> StatePlacement:
        """See `fsdp.shards.state_placement.Place`."""
        return place_local(where, self.cut, shapes, dtype)

    @property
    def keeps_rows(self) -> bool:
        """Whether each row of the tensor lies on one rank."""
        return len(self.shape) > 1 and not self.cut_by_element and self.cut.row > 0

    def covers(self, other: "ShardInfo") -> bool:
        """Whether `other` is broadcast along the rows of this tensor: each of its rows lies on the same rank."""
        rows = self.of_row_sizes(other.shape)
        return rows is not None and other.keeps_rows and rows.cut == other.cut

    def of_row_sizes(self, sizes: Shape) -> "ShardInfo | None":
        """The shard of a tensor of shape `sizes`, whose rows lie where those of this one lie; None if it has no such rows."""
        has_rows = self.keeps_rows and len(sizes) == len(self.shape) and sizes[0] == self.shape[0]
        if not has_rows or not all(size in (1, full) for size, full in zip(sizes[1:], self.shape[1:], strict=True)):
            return None
        return self.of_rows(Size((self.local_shape[0], *sizes[1:])))

    def part_of(self, plain: Tensor) -> Tensor | None:
        """The part of an ordinary tensor with which this rank's part is combined, element by element; None if it can't be.

        A number and a tensor of the shape of the part are taken as they are. A tensor that can be broadcast to the full shape is
        the same on every rank, so each rank takes its own elements, or all if they are broadcast over its rows.
        """
        shape, dims = tuple(plain.shape), len(self.shape)
        if shape == self.local_shape or (plain.numel() == 1 and len(shape) <= dims):
            return plain
        rest = self.shape[dims - len(shape) :]
        if len(shape) > dims or not all(have in (1, full) for have, full in zip(shape, rest, strict=True)):
            return None
        if not self.cut_by_element and (len(shape) < dims or shape[0] == 1):
            return plain
        if (rows := self.of_row_sizes(shape)) is not None:
            return plain.narrow(0, self.first // self.cut.row, rows.local_shape[0])
        return self.part_of_full(plain.expand(self.shape))

    def part_of_full(self, full: Tensor) -> Tensor:
        """The part of an ordinary tensor of the full shape."""
        return full.reshape(-1)[self.first : self.first + self.local_shape.numel()].view(self.local_shape)
