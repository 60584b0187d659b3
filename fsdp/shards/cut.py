"""Which elements of a flattened tensor each rank holds. Pure arithmetic, no torch."""

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
