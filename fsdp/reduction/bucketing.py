"""Which buckets share a collective, and in which order collectives are launched. Pure.

Rule 1: a pure function of the order and the sizes, so all ranks that agree on the order agree on the parcels.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from fsdp.params.layout import limit_of


class Item(NamedTuple):
    """One bucket, as its size and what it can be added to."""

    size: int
    """Bytes."""
    kind: Hashable
    """Buckets of one kind (dtypes, device) can share a collective."""
    ends: bool = False
    """It is the last of its parcel."""


Parcel = tuple[int, ...]
"""The numbers of the buckets that one collective reduces."""


def make_parcels(
    order: Sequence[int], items: Sequence[Item], cap: int | None, first: int, tapers: bool = False
) -> tuple[Parcel, ...]:
    """Put buckets (by number, in `order`) into parcels of at most `cap` bytes, the first one of at most `first`; or of one.

    A parcel is launched when its last bucket is ready, so parcels come in the order of their last ones. `cap` None: no two
    share one. `tapers`: see `limit_of`.
    """
    if cap is None:
        return tuple((number,) for number in order)
    closed = sorted(_fill(order, items, cap, min(first, cap), tapers), key=lambda parcel: parcel[0])
    return tuple(parcel for _, parcel in closed)


def _fill(order: Sequence[int], items: Sequence[Item], cap: int, first: int, tapers: bool) -> Iterator[tuple[int, Parcel]]:
    """Each parcel with the place of its last bucket in the order."""
    limit, left = first, sum(items[number].size for number in order)
    filling: dict[Hashable, tuple[int, int, Parcel]] = {}
    for place, number in enumerate(order):
        size, kind, ends = items[number]
        last, total, parcel = filling.pop(kind, (place, 0, ()))
        if parcel and total + size > limit:
            yield last, parcel
            left -= total
            limit, total, parcel = limit_of(left, cap, tapers), 0, ()
        if ends:
            yield place, (*parcel, number)
            left -= total + size
            limit = limit_of(left, cap, tapers)
        else:
            filling[kind] = (place, total + size, (*parcel, number))
    for last, _, parcel in filling.values():
        yield last, parcel
