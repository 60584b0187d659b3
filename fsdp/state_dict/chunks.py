"""A range of a flattened tensor as boxes of the tensor. Pure arithmetic, no torch.

Checkpoints know boxes only: offsets and sizes, one of each a dimension.
"""

from math import prod
from typing import NamedTuple

from fsdp.params.layout import Shape


class Box(NamedTuple):
    """A box of a tensor whose elements follow each other in the flattened tensor."""

    offsets: Shape
    sizes: Shape
    start: int
    """Its first element, from the beginning of the range."""


def boxes_of(shape: Shape, first: int, numel: int) -> tuple[Box, ...]:
    """The `numel` elements from `first` on of a flattened tensor of `shape`, as few boxes, in order.

    At most 2n - 1 for n dimensions: the end of a row, whole rows, the beginning of a row, where the
    two ends are ranges of a tensor with one dimension less. Example: elements 2 to 8 of shape (3, 4):

        . . a a
        b b b b
        c . . .
    """
    if numel == 0:
        return ()
    if numel == prod(shape):
        return (Box((0,) * len(shape), shape, 0),)
    row = prod(shape[1:])
    low, before = divmod(first, row)
    high, after = divmod(first + numel, row)
    if low == high:
        return _in_row(low, boxes_of(shape[1:], before, numel), 0)
    found: tuple[Box, ...] = ()
    if before:
        found += _in_row(low, boxes_of(shape[1:], before, row - before), 0)
        low += 1
    if low < high:
        found += (Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]), low * row - first),)
    if after:
        found += _in_row(high, boxes_of(shape[1:], 0, after), high * row - first)
    return found


def _in_row(row: int, boxes: tuple[Box, ...], start: int) -> tuple[Box, ...]:
    return tuple(Box((row, *box.offsets), (1, *box.sizes), start + box.start) for box in boxes)
