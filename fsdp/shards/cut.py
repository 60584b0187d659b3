"""Which elements of a flattened tensor each rank holds, and such a range as boxes. Pure arithmetic, no torch."""

from itertools import accumulate
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """The elements of a flattened tensor that each rank holds. The first holder's are followed by those of the next rank.

    Two tensors with equal cuts hold the same elements on each rank.
    """

    shape: Shape
    """The shape of the full tensor."""
    num_ranks: int
    first_rank: int
    """The first rank that holds elements."""
    numel_first: int | None
    """The elements on that rank; None if it holds all."""
    numel_next: int | None
    """The most elements that a further rank holds; None if there is at most one further rank."""

    @property
    def row(self) -> int:
        """The number of elements of one row."""
        return prod(self.shape[1:])

    @property
    def by_element(self) -> bool:
        """Whether a row of the tensor lies on two ranks."""
        return self.row > 0 and any([numel is not None and numel % self.row for numel in (self.numel_first, self.numel_next)])

    def of_rows(self, rest: Shape) -> "Cut":
        """The cut of a tensor with as many rows, each of shape `rest`, whose rows lie on the same ranks."""
        first, following = (None if n is None else n // self.row * prod(rest) for n in (self.numel_first, self.numel_next))
        return self._replace(shape=(self.shape[0], *rest), numel_first=first, numel_next=following)

    def numels(self) -> list[int]:
        """The number of elements on each rank."""
        left, numels = prod(self.shape), [0] * self.num_ranks
        most = left if self.numel_first is None else self.numel_first
        for rank in range(self.first_rank, self.num_ranks):
            numels[rank] = min(left, most)
            left -= numels[rank]
            most = left if self.numel_next is None else self.numel_next
        return numels

    def spans(self) -> list[tuple[int, int, int]]:
        """Of each rank: its number, its first element in the flattened tensor, and how many elements it holds."""
        numels = self.numels()
        return list(zip(range(self.num_ranks), accumulate(numels, initial=0), numels, strict=False))


def part_shape(shape: Shape, numel: int, by_element: bool) -> Shape:
    """The shape of a part with `numel` elements of a tensor of `shape`, which is cut between rows or, `by_element`, inside them.

    Shapes:   all of it: shape
              cut between rows: (k, *rest), where k may be 0
              cut by element: (1, ..., 1, numel)
              no dimensions, on a rank that holds nothing: (0,)
    """
    if numel == prod(shape):
        return shape
    if not shape:
        return (0,)
    if by_element:
        return (*(1,) * (len(shape) - 1), numel)
    return (numel // prod(shape[1:]), *shape[1:])


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
