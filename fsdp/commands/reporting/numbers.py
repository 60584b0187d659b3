"""The numbers of a report: what each rank did in a step, from its trace.

A step is divided into four parts without overlap: computing, waiting for communication, the engine's own work on the host, and
the rest, such as the optimizer, the loss and the data loader.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from fsdp.commands.reporting.rank_trace import RankTrace, Slice
from fsdp.errors import ShardingError

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


GATHERS = "gathers"
REDUCTIONS = "reductions"
OTHERS = "other collectives"
PARTS = ("computing", "exposed communication", "host of the engine", "rest")
_KINDS = {"all_gather": GATHERS, "reduce_scatter": REDUCTIONS}


@dataclass(frozen=True)
class StepNumbers:
    """One step of one rank. Times are microseconds, sizes bytes."""

    number: int
    began: float
    ended: float
    computing: float
    waiting: float
    """Communication that was exposed: the host waited for it."""
    engine: float
    communication: float
    """Time in which a collective was in flight, exposed or hidden."""
    exposed: dict[tuple[str, str], float] = field(default_factory=dict)
    """Time waited, by lane and by unit."""
    received: dict[str, int] = field(default_factory=dict)
    """Bytes received, by kind of collective."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Number of collectives, by kind."""
    peak: int = 0
    held_at_peak: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> float:
        return self.ended - self.began

    @property
    def rest(self) -> float:
        """What is neither computing nor waiting nor the engine's work."""
        return max(0.0, self.length - self.computing - self.waiting - self.engine)

    @property
    def parts(self) -> dict[str, float]:
        """The four parts by name."""
        return dict(zip(PARTS, (self.computing, self.waiting, self.engine, self.rest), strict=True))

    @property
    def own(self) -> float:
        """What this rank did itself: the step without its waits."""
        return self.length - self.waiting


@dataclass(frozen=True)
class RankNumbers:
    """The steps of one rank, and the one that stands for them."""

    rank: int
    steps: Sequence[StepNumbers]

    @property
    def typical(self) -> StepNumbers:
        """The step of median length."""
        return sorted(self.steps, key=lambda step: step.length)[(len(self.steps) - 1) // 2]


def numbers_of(trace: RankTrace) -> RankNumbers:
    """The numbers of one rank.

    Raises:
        ShardingError: its trace has no complete training step.
    """
    complete = [one for one in trace.steps if one.args["backward_began"] is not None and not one.args["abandoned"]]
    if not complete:
        raise ShardingError(
            f"the trace of rank {trace.rank} has no complete training step, a forward and a backward that reduces; trace at "
            "least two steps."
        )
    return RankNumbers(trace.rank, [_step_numbers(trace, one) for one in complete])


def waits_of(collectives: Sequence[Slice]) -> list[Interval]:
    """The stretches in which the host waited for these collectives."""
    return [
        (one.args["wait_began"], one.args["wait_began"] + one.args["waited"]) for one in collectives if "wait_began" in one.args
    ]


def slowest(ranks: Sequence[RankNumbers]) -> tuple[RankNumbers, float]:
    """The rank with the most work of its own in a step, and by how much it exceeds the median of all ranks."""
    own = {one.rank: median(step.own for step in one.steps) for one in ranks}
    last = max(ranks, key=lambda one: own[one.rank])
    return last, own[last.rank] - median(own.values())


def _step_numbers(trace: RankTrace, step: Slice) -> StepNumbers:
    collectives = inside(trace.collectives, step)
    waits, computes = waits_of(collectives), [one[:2] for one in inside(trace.computing, step)]
    engine = [one[:2] for one in inside(trace.engine, step)]
    exposed: Counter[tuple[str, str]] = Counter()
    for one in collectives:
        exposed[lane_of(one), one.args["unit"]] += one.args.get("waited", 0.0)
    peak, held = _peak(trace.memory, step)
    kinds = [one.args["collective"] for one in collectives]
    return StepNumbers(
        step.args["step"],
        step.began,
        step.ended,
        computing=length(computes) - overlap(computes, waits),
        waiting=length(waits),
        engine=length(engine) - overlap(engine, waits),
        communication=length((one.began, one.ended) for one in collectives),
        exposed=dict(exposed),
        received={
            kind: sum(one.args["received"] for one in collectives if one.args["collective"] == kind) for kind in set(kinds)
        },
        collectives=dict(Counter(kinds)),
        peak=peak,
        held_at_peak=held,
    )


def lane_of(collective: Slice) -> str:
    """The lane of a collective in the report."""
    return _KINDS.get(collective.args["collective"], OTHERS)


def inside(slices: Iterable[Slice], step: Slice | StepNumbers) -> list[Slice]:
    """Those that begin in a step."""
    return [one for one in slices if step.began <= one.began < step.ended]


def _peak(memory: Sequence[tuple[float, dict[str, int]]], step: Slice) -> tuple[int, dict[str, int]]:
    before = [held for time, held in memory if time <= step.began][-1:]
    during = [held for time, held in memory if step.began < time < step.ended]
    held = max([*before, *during], key=lambda one: sum(one.values()), default={})
    return sum(held.values()), {kind: count for kind, count in held.items() if count}
