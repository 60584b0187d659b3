"""Replays a traced step as it would be with other options: from what each rank does between its collectives.

[Note: the model of a replay]
A rank is a list of operations of its host, in order: it is busy for a time, it launches a collective, it waits for one. A rank
has one wire. A collective begins when all its ranks have launched it and the wire has carried what was launched before, and
takes as long as it took in the trace. A change of options moves, joins or removes launches and waits; what a rank computes
stays. So a replay knows nothing of computing that gets slower while more is sent, and nothing of the optimizer's memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from fsdp.commands.reporting.numbers import RankNumbers, StepNumbers, inside
from fsdp.commands.reporting.rank_trace import RankTrace, Slice
from fsdp.errors import ShardingError

Key = tuple[str, int]
"""A collective: its communicator and its number there."""


@dataclass(frozen=True)
class Operation:
    """One operation of a host."""

    what: Literal["busy", "launch", "wait"]
    seconds: float = 0.0
    """Microseconds: of a busy host, or of the collective on the wire."""
    key: Key = ("", 0)
    kind: str = ""
    """Of a collective: `all_gather`, `reduce_scatter` and so on."""
    unit: str = ""
    received: int = 0
    in_backward: bool = False


@dataclass(frozen=True)
class Wire:
    """What a collective takes: so long, and so much more for each byte."""

    latency: float
    per_byte: float

    def takes(self, received: float) -> float:
        return self.latency + self.per_byte * received


@dataclass(frozen=True)
class ReplayedRank:
    """The operations of one rank in one step."""

    operations: Sequence[Operation]
    wire: Wire


def ranks_of(traces: Sequence[RankTrace], numbers: Sequence[RankNumbers], number: int) -> list[ReplayedRank]:
    """Every rank in the step with that number. The clocks of the traces are aligned."""
    steps = [next(step for step in one.steps if step.number == number) for one in numbers]
    launched: dict[Key, float] = {}
    for trace, step in zip(traces, steps, strict=True):
        for one in inside(trace.collectives, step):
            if one.args["ranks"] == len(traces):
                launched[_key(one)] = max(launched.get(_key(one), one.began), one.began)
    return [_rank_of(trace, step, launched) for trace, step in zip(traces, steps, strict=True)]


def replayed(ranks: Sequence[ReplayedRank]) -> float:
    """How long the step takes, in microseconds, until the last rank has ended it. See [Note: the model of a replay].

    Raises:
        ShardingError: the ranks wait for each other, because they have launched different collectives.
    """
    shared = _shared_keys(ranks)
    launches: dict[Key, dict[int, float]] = {}
    hosts = [_Host(rank.operations) for rank in ranks]
    while not all(host.is_over for host in hosts):
        moved = [host.advance(number, launches, shared, len(ranks)) for number, host in enumerate(hosts)]
        if not any(moved):
            raise ShardingError(
                "the ranks have traced different collectives in one step; begin and end `fsdp.trace` in the same step on every "
                "rank."
            )
    return max(host.time for host in hosts)


def with_prefetch(rank: ReplayedRank, depth: int) -> ReplayedRank:
    """The same step with `prefetch=depth`."""
    found = list(rank.operations)
    for in_backward in (False, True):
        found = _prefetched(found, in_backward, depth)
    return replace(rank, operations=found)


def without_second_gather(rank: ReplayedRank) -> ReplayedRank:
    """The same step if units stay gathered between forward and backward."""
    first = {one.unit for one in rank.operations if one.kind == "all_gather" and not one.in_backward}
    return replace(rank, operations=[one for one in rank.operations if not (_is_gather(one, True) and one.unit in first)])


def with_buckets(rank: ReplayedRank, cap: float) -> ReplayedRank:
    """The same step if reductions that follow each other share a collective of at most `cap` received bytes."""
    groups: list[list[Operation]] = []
    for one in rank.operations:
        if one.what == "launch" and one.kind == "reduce_scatter":
            if groups and sum(each.received for each in groups[-1]) + one.received <= cap:
                groups[-1].append(one)
            else:
                groups.append([one])
    joined = {group[-1].key: rank.wire.takes(sum(one.received for one in group)) for group in groups if len(group) > 1}
    gone = {one.key for group in groups for one in group[:-1]}
    kept = [one for one in rank.operations if one.what == "busy" or one.key not in gone]
    return replace(rank, operations=[replace(one, seconds=joined[one.key]) if one.key in joined else one for one in kept])


def with_busy(rank: ReplayedRank, factor: float) -> ReplayedRank:
    """The same step on a rank whose host and device take `factor` of their time."""
    busy = [replace(one, seconds=one.seconds * factor) if one.what == "busy" else one for one in rank.operations]
    return replace(rank, operations=busy)


class _Host:
    """The host of one rank in a replay."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._next = 0
        self._queue: list[tuple[Operation, float]] = []
        """Launched and not yet on the wire."""
        self._ended: dict[Key, float] = {}
        self._wire_free = 0.0
        self.time = 0.0

    @property
    def is_over(self) -> bool:
        return self._next == len(self._operations)

    def advance(self, rank: int, launches: dict[Key, dict[int, float]], shared: set[Key], ranks: int) -> bool:
        """Execute operations until one has to wait for another rank; return whether any was executed."""
        begin = self._next
        while not self.is_over:
            operation = self._operations[self._next]
            if operation.what == "busy":
                self.time += operation.seconds
            elif operation.what == "launch":
                self._queue.append((operation, self.time))
                if operation.key in shared:
                    launches.setdefault(operation.key, {})[rank] = self.time
            elif not self._carry(operation.key, launches, shared, ranks):
                break
            else:
                self.time = max(self.time, self._ended.get(operation.key, self.time))
            self._next += 1
        return self._next > begin

    def _carry(self, key: Key, launches: dict[Key, dict[int, float]], shared: set[Key], ranks: int) -> bool:
        """Put collectives on the wire up to `key`; return whether it has ended there."""
        while key not in self._ended and self._queue:
            one, launched = self._queue[0]
            if one.key in shared:
                others = launches[one.key]
                if len(others) < ranks:
                    return False
                launched = max(others.values())
            self._wire_free = max(self._wire_free, launched) + one.seconds
            self._ended[one.key] = self._wire_free
            del self._queue[0]
        return True


def _shared_keys(ranks: Sequence[ReplayedRank]) -> set[Key]:
    """The collectives that every rank launches."""
    keys = [{one.key for one in rank.operations if one.what == "launch"} for rank in ranks]
    return set.intersection(*keys) if len(ranks) > 1 else set()


def _prefetched(operations: list[Operation], in_backward: bool, depth: int) -> list[Operation]:
    """The operations with the gathers of one pass launched `depth` units ahead."""
    launches = {one.key: one for one in operations if one.what == "launch" and _is_gather(one, in_backward)}
    waits = [one.key for one in operations if one.what == "wait" and one.key in launches]
    after: dict[Key, list[Operation]] = {}
    before: dict[Key, list[Operation]] = {}
    for number, key in enumerate(waits):
        ahead = number - depth
        if depth == 0 or number == 0:
            before.setdefault(key, []).append(launches[key])
        elif ahead < 0 and in_backward:
            before.setdefault(waits[0], []).append(launches[key])
        else:
            after.setdefault(waits[max(0, ahead)], []).append(launches[key])
    found: list[Operation] = []
    for one in operations:
        if one.what == "launch" and one.key in launches and one.key in waits:
            continue
        is_wait = one.what == "wait"
        found += before.get(one.key, []) if is_wait else []
        found.append(one)
        found += after.get(one.key, []) if is_wait else []
    return found


def _is_gather(one: Operation, in_backward: bool) -> bool:
    return one.kind == "all_gather" and one.in_backward is in_backward


def _rank_of(trace: RankTrace, step: StepNumbers, launched: dict[Key, float]) -> ReplayedRank:
    collectives = inside(trace.collectives, step)
    wire, taken = _measured(collectives, launched)
    slice_of_step = next(one for one in trace.steps if one.args["step"] == step.number)
    return ReplayedRank(list(_operations(collectives, step, taken, slice_of_step.args["backward_began"])), wire)


def _operations(
    collectives: Sequence[Slice], step: StepNumbers, taken: dict[Key, float], backward_began: float
) -> Iterator[Operation]:
    moments: list[tuple[float, float, Operation]] = []
    for one in collectives:
        told = Operation(
            "launch",
            taken[_key(one)],
            _key(one),
            one.args["collective"],
            one.args["unit"],
            one.args["received"],
            one.began >= backward_began,
        )
        moments.append((one.began, one.began, told))
        if "wait_began" in one.args:
            began = one.args["wait_began"]
            moments.append((began, began + one.args["waited"], replace(told, what="wait")))
    time = step.began
    for began, ended, operation in sorted(moments, key=lambda moment: moment[0]):
        if began > time:
            yield Operation("busy", began - time)
        yield operation
        time = max(time, ended)
    yield Operation("busy", max(0.0, step.ended - time))


def _measured(collectives: Sequence[Slice], launched: dict[Key, float]) -> tuple[Wire, dict[Key, float]]:
    """What a collective takes on the wire, and what each of these took.

    An end is known if the host waited for it. Together with an idle wire it gives what a collective takes; where the end or the
    begin is not known, it follows from such ones.
    """
    ordered = sorted(collectives, key=lambda one: one.began)
    exact: list[tuple[int, float]] = []
    free = seen = float("-inf")
    for one in ordered:
        ready, end = _ready(one, launched), one.args.get("end_before", one.ended)
        # where the end of the one before is not known, it was over when it was seen so
        idle = max([ready, *([] if free == float("inf") else [free])])
        if _end_is_known(one) and (free < float("inf") or seen <= ready):
            exact.append((one.args["received"], end - idle))
        seen = max(seen, end)
        free = end if _end_is_known(one) else float("inf")
    wire, taken = _fit(exact), {}
    free = float("-inf")
    for one in ordered:
        start, end = max(_ready(one, launched), free), one.args.get("end_before", one.ended)
        low, high = max(0.0, one.args.get("end_after", one.began) - start), max(0.0, end - start)
        known = _end_is_known(one)
        taken[_key(one)] = high if known else min(max(wire.takes(one.args["received"]), low), max(low, high))
        free = start + taken[_key(one)]
    return wire, taken


def _ready(one: Slice, launched: dict[Key, float]) -> float:
    """When every rank had launched a collective."""
    return max(one.began, launched.get(_key(one), one.began))


def _end_is_known(one: Slice) -> bool:
    return one.args.get("waited", 0.0) > 0 and bool(one.args["wait_began"] < one.args.get("end_before", 0.0))


def _fit(exact: Sequence[tuple[int, float]]) -> Wire:
    """The straight line through what collectives of known ends took, by medians of the small and of the large ones."""
    if not exact:
        return Wire(0.0, 0.0)
    ordered = sorted(exact)
    half = max(1, len(ordered) // 2)
    small, large = ordered[:half], ordered[-half:]
    size = [median(one[0] for one in part) for part in (small, large)]
    time = [median(one[1] for one in part) for part in (small, large)]
    slope = (time[1] - time[0]) / (size[1] - size[0]) if size[1] > size[0] else 0.0
    slope = max(0.0, slope)
    return Wire(max(0.0, time[0] - slope * size[0]), slope)


def _key(one: Slice) -> Key:
    return one.args["comm"], one.args["number"]
