"""Advice about options, each with the gain that a replay of the traced step expects."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fsdp.commands.reporting.formats import milliseconds, size
from fsdp.commands.reporting.numbers import GATHERS, RankNumbers, slowest
from fsdp.commands.reporting.rank_trace import RankTrace
from fsdp.commands.reporting.replay import (
    ReplayedRank,
    ranks_of,
    replayed,
    with_buckets,
    with_busy,
    with_prefetch,
    without_second_gather,
)

WORTH: Final = 0.02
"""The smallest gain that is worth advice, as a part of the step."""
DEPTHS: Final = (1, 2, 3, 4)
CAPS_MB: Final = (4, 25, 100)


@dataclass(frozen=True)
class Advice:
    """One change, and what it would bring."""

    change: str
    """The option as it is given in code, or a sentence if it is no option."""
    reason: str
    gain: float
    """Microseconds of a step."""
    share: float
    """The gain as a part of the step."""
    cost: str = ""
    """What it costs, in words."""


def advise(traces: Sequence[RankTrace], numbers: Sequence[RankNumbers]) -> list[Advice]:
    """Advice for a job, the largest gain first. Each is about the job as it was traced: gains do not add up."""
    common = set.intersection(*({step.number for step in one.steps} for one in numbers))
    if not common:
        return []
    step = sorted((one for one in numbers[0].steps if one.number in common), key=lambda one: one.length)[(len(common) - 1) // 2]
    ranks = ranks_of(traces, numbers, step.number)
    now = replayed(ranks)
    found = [
        Advice(change, reason, gain, gain / now, cost)
        for change, reason, cost, after in _candidates(traces, numbers, ranks)
        if (gain := now - replayed(after)) >= WORTH * now
    ]
    best: dict[str, Advice] = {}
    for one in found:
        option = one.change.partition("=")[0]
        # a deeper prefetch that gains hardly more is not worth its memory
        if option not in best or one.gain > best[option].gain + WORTH * now:
            best[option] = one
    return sorted(best.values(), key=lambda one: -one.gain)


def _candidates(
    traces: Sequence[RankTrace], numbers: Sequence[RankNumbers], ranks: Sequence[ReplayedRank]
) -> Iterator[tuple[str, str, str, list[ReplayedRank]]]:
    """Changes: in code, the reason, the cost, and the ranks after the change."""
    options, typical = traces[0].info["options"], numbers[0].typical
    sizes = traces[0].info["unit_bytes"]
    late = sum(waited for (lane, _), waited in typical.exposed.items() if lane == GATHERS)
    for depth in DEPTHS:
        if depth > options["prefetch"]:
            more = sum(sorted(sizes)[-depth:]) - sum(sorted(sizes)[-options["prefetch"] :] if options["prefetch"] else [])
            reason = f"the host waits {milliseconds(late)} ms of a step for gathers, while prefetch={options['prefetch']}"
            cost = f"up to {size(more)} more unsharded parameters at once"
            yield f"prefetch={depth}", reason, cost, [with_prefetch(rank, depth) for rank in ranks]
    if options["reshard"] == "AFTER_FORWARD":
        reason = "each unit is gathered in the forward and again in the backward"
        cost = f"{size(sum(sizes))} of unsharded parameters stay in memory between forward and backward"
        yield "sharding_strategy='SHARD_GRAD_OP'", reason, cost, [without_second_gather(rank) for rank in ranks]
    count = typical.collectives.get("reduce_scatter", 0)
    largest = max((one.received for one in ranks[0].operations if one.kind == "reduce_scatter"), default=0)
    sharing = [one.args["ranks"] for one in traces[0].collectives if one.args["collective"] == "reduce_scatter"]
    shards = min([traces[0].world_size, *sharing])
    for cap in CAPS_MB:
        received = cap * 2**20 * (shards - 1) / shards
        if count > 1 and received > largest:
            reason = f"{count} reductions of a step are so small that each costs mostly its latency"
            cost = "gradients of several units wait for each other"
            change = f"reduction=fsdp.ReductionPolicy(bucket_cap_mb={cap})"
            yield change, reason, cost, [with_buckets(rank, received) for rank in ranks]
    last, excess = slowest(numbers)
    if len(ranks) > 1 and excess > 0:
        number = next(index for index, one in enumerate(numbers) if one.rank == last.rank)
        own = last.typical.own
        faster = list(ranks)
        faster[number] = with_busy(ranks[number], (own - excess) / own)
        reason = (
            f"rank {last.rank} works {milliseconds(excess)} ms of a step longer than the median of the ranks, which wait for it"
        )
        yield f"make rank {last.rank} as fast as the others", reason, "", faster
