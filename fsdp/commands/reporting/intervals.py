"""Sums and overlaps of stretches of time."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches without overlaps, in order."""
    found: list[Interval] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The time in any of the stretches."""
    return sum(ended - began for began, ended in union(intervals))


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """The time in both."""
    return length(one) + length(other) - length([*one, *other])
