"""Which buckets share a collective, and in which order collectives are launched. Pure.

Rule 1: a pure function of the order and the sizes, so ranks that agree on the order agree on the bucket groups.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from fsdp.params.layout import next_bucket_limit


class Item(NamedTuple):
    """One bucket, as far as grouping needs it."""

    size: int
    """Its bytes."""
    kind: Hashable
    """Buckets of one kind (dtypes, device) can share a collective."""
    ends: bool = False
    """True if it is the last one of its group."""


BucketGroup = tuple[int, ...]
"""The numbers of the buckets that one collective reduces."""


def make_bucket_groups(
    order: Sequence[int], items: Sequence[Item], cap: int | None, first: int, tapers: bool = False
) -> tuple[BucketGroup, ...]:
    """Put buckets (by number, in `order`) into groups of at most `cap` bytes, the first group of at most `first` bytes.

    A bucket that is larger is a group of its own; with `cap` None each bucket is. A group is launched when its last bucket is
    ready, so groups are sorted by their last buckets. `tapers`: see `next_bucket_limit`.
    """
    if cap is None:
        return tuple((number,) for number in order)
    closed = sorted(_fill(order, items, cap, min(first, cap), tapers), key=lambda group: group[0])
    return tuple(group for _, group in closed)


def _fill(order: Sequence[int], items: Sequence[Item], cap: int, first: int, tapers: bool) -> Iterator[tuple[int, BucketGroup]]:
    """Each group, with the place of its last bucket in the order."""
    limit, left = first, sum(items[number].size for number in order)
    filling: dict[Hashable, tuple[int, int, BucketGroup]] = {}
    for place, number in enumerate(order):
        size, kind, ends = items[number]
        last, total, group = filling.pop(kind, (place, 0, ()))
        if group and total + size > limit:
            yield last, group
            left -= total
            limit, total, group = next_bucket_limit(left, cap, tapers), 0, ()
        if ends:
            yield place, (*group, number)
            left -= total + size
            limit = next_bucket_limit(left, cap, tapers)
        else:
            filling[kind] = (place, total + size, (*group, number))
    for last, _, group in filling.values():
        yield last, group
