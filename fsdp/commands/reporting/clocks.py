"""Aligns the clocks of ranks by their collectives, and merges their traces.

[Note: how clocks are aligned]
No rank sees the end of a gather, a reduction or an exchange before every rank has launched it. So for each such collective the
clock of rank b is ahead of that of rank a by at most (its end on b) - (its launch on a), and by at least (its launch on b) - (its
end on a). Each collective of all ranks narrows the interval, and its middle is taken. Half of its width is the largest error.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from fsdp.commands.reporting.rank_trace import RankTrace, Slice, trace_of
from fsdp.errors import ShardingError

SYMMETRIC: Final = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that end on no rank before all ranks have launched them."""


class Offset(NamedTuple):
    """By how much the clock of a rank is ahead of that of the first rank, in microseconds."""

    middle: float
    error: float


def aligned(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[Offset]]:
    """The traces on the clock of the first one, and the offsets that were taken off.

    Raises:
        ShardingError: the ranks have traced different steps.
    """
    offsets = [offset(traces[0], trace) for trace in traces]
    moved = [[_moved(event, -one.middle) for event in trace.events] for trace, one in zip(traces, offsets, strict=True)]
    return [trace_of(trace.info, events) for trace, events in zip(traces, moved, strict=True)], offsets


def offset(first: RankTrace, other: RankTrace) -> Offset:
    """How far the clock of `other` is ahead of that of `first`. See [Note: how clocks are aligned].

    Raises:
        ShardingError: the ranks have traced different steps, so that the intervals do not meet.
    """
    if first is other:
        return Offset(0.0, 0.0)
    low, high = float("-inf"), float("inf")
    for mine, theirs in pairs(first, other):
        low = max(low, theirs.began - mine.ended)
        high = min(high, theirs.ended - mine.began)
    if low > high + 1:
        raise ShardingError(
            f"ranks {first.rank} and {other.rank} have traced different steps: no difference of their clocks explains when their "
            "collectives ended. Begin and end `fsdp.trace` in the same step on every rank."
        )
    if high == float("inf"):
        # no collective of all ranks: the clocks of the hosts are what is left
        return Offset((first.info["began_at"] - other.info["began_at"]) * 1e6, float("inf"))
    return Offset((low + high) / 2, max(0.0, high - low) / 2)


def pairs(first: RankTrace, other: RankTrace) -> Iterator[tuple[Slice, Slice]]:
    """The collectives of all ranks that both have traced, one of each.

    Raises:
        ShardingError: the ranks have traced different collectives.
    """
    mine, theirs = _of_all_ranks(first), _of_all_ranks(other)
    for comm, calls in mine.items():
        for one, two in zip(calls, theirs.get(comm, ()), strict=False):
            if one.name != two.name:
                raise ShardingError(
                    f"rank {first.rank} has traced {one.name} where rank {other.rank} has traced {two.name}. Begin and end "
                    "`fsdp.trace` in the same step on every rank."
                )
            if one.args["collective"] in SYMMETRIC and not one.args.get("unfinished") and not two.args.get("unfinished"):
                yield one, two


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One file with the traces of all ranks, on the clock of the first one.

    Raises:
        ShardingError: the ranks have traced different steps.
    """
    moved, offsets = aligned(traces)
    ranks = [
        {**trace.info, "clock_offset": one.middle, "clock_error": one.error if one.error != float("inf") else None}
        for trace, one in zip(moved, offsets, strict=True)
    ]
    return {
        "displayTimeUnit": "ms",
        "fsdp": {"version": traces[0].info["version"], "ranks": ranks},
        "traceEvents": [event for trace in moved for event in trace.events],
    }


def _of_all_ranks(trace: RankTrace) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {}
    for one in sorted(trace.collectives, key=lambda one: int(one.args["number"])):
        if one.args["ranks"] == trace.world_size:
            found.setdefault(one.args["comm"], []).append(one)
    return found


def _moved(event: dict[str, Any], by: float) -> dict[str, Any]:
    if "ts" not in event:
        return event
    args = {
        name: value + by if name in ("wait_began", "end_after", "end_before", "backward_began") and value is not None else value
        for name, value in event["args"].items()
    }
    return {**event, "ts": event["ts"] + by, "args": args}
