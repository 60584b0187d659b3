"""A range of a flattened tensor as chunks of the tensor. Pure arithmetic, no torch.

A chunk is a box of a tensor. torch's Distributed Checkpoint stores a box by its offset and its size in each dimension.
"""

from math import prod
from typing import NamedTuple

from fsdp.shards.cut import Shape


class Chunk(NamedTuple):
    """A box of a tensor whose elements are contiguous in the flattened tensor."""

    offsets: Shape
    sizes: Shape
    start: int
    """Position of its first element, counted from the beginning of the range."""


def chunks_of(shape: Shape, first: int, numel: int) -> tuple[Chunk, ...]:
    """Cut `numel` elements of a flattened tensor of `shape`, beginning with `first`, into as few chunks as possible, in order.

    At most 2n - 1 for n dimensions: the end of a row, full rows, the beginning of a row, where the
    two ends are ranges of a tensor with one dimension less. Example: elements 2 to 8 of shape (3, 4):

        . . a a
        b b b b
        c . . .
    """
    if numel == 0:
        return ()
    if numel == prod(shape):
        return (Chunk((0,) * len(shape), shape, 0),)
    row = prod(shape[1:])
    low, before = divmod(first, row)
    high, after = divmod(first + numel, row)
    if low == high:
        return _in_row(low, chunks_of(shape[1:], before, numel), 0)
    found: tuple[Chunk, ...] = ()
    if before:
        found += _in_row(low, chunks_of(shape[1:], before, row - before), 0)
        low += 1
    if low < high:
        found += (Chunk((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]), low * row - first),)
    if after:
        found += _in_row(high, chunks_of(shape[1:], 0, after), high * row - first)
    return found


def _in_row(row: int, chunks: tuple[Chunk, ...], start: int) -> tuple[Chunk, ...]:
    """Chunks of one row as chunks of the tensor, `start` elements later."""
    return tuple(Chunk((row, *chunk.offsets), (1, *chunk.sizes), start + chunk.start) for chunk in chunks)
