"""The report as text: one table of ranks, the units whose communication is exposed, and the advice."""

from collections.abc import Iterator, Sequence

from fsdp.commands.reporting.advice import Advice
from fsdp.commands.reporting.clocks import Offset
from fsdp.commands.reporting.formats import milliseconds, size, table
from fsdp.commands.reporting.numbers import PARTS, RankNumbers, slowest

MOST_UNITS = 10


def lines_of(
    numbers: Sequence[RankNumbers], offsets: Sequence[Offset], missing: Sequence[int], advice: Sequence[Advice]
) -> list[str]:
    """The lines of the report."""
    return [
        *_ranks(numbers),
        "",
        *_exposed(numbers),
        "",
        *_communication(numbers),
        *_memory(numbers),
        *_slowest(numbers),
        *_clocks(offsets, missing),
        "",
        *_advice(advice),
    ]


def advice_line(one: Advice) -> str:
    """A piece of advice as a sentence."""
    cost = f" Costs: {one.cost}." if one.cost else ""
    return f"{one.change}: {milliseconds(one.gain)} ms of a step ({one.share:.0%}) expected, because {one.reason}.{cost}"


def _ranks(numbers: Sequence[RankNumbers]) -> Iterator[str]:
    yield "The step of median length on each rank, in milliseconds:"
    header = ("rank", "steps", "step", *PARTS, "in flight")
    rows = []
    for one in numbers:
        step = one.typical
        times = (step.length, *step.parts.values(), step.communication)
        rows.append([str(one.rank), str(len(one.steps)), *map(milliseconds, times)])
    yield from table(header, rows)


def exposed_units(numbers: Sequence[RankNumbers]) -> list[tuple[str, str, float]]:
    """Lane, unit and microseconds of a step that the host waits there: the mean over the ranks, the longest first."""
    found: dict[tuple[str, str], float] = {}
    for one in numbers:
        for place, waited in one.typical.exposed.items():
            found[place] = found.get(place, 0.0) + waited / len(numbers)
    return sorted(((*place, waited) for place, waited in found.items() if waited > 0), key=lambda row: -row[2])


def _exposed(numbers: Sequence[RankNumbers]) -> Iterator[str]:
    found = exposed_units(numbers)
    yield "Exposed communication by unit, mean over the ranks:"
    if not found:
        yield "none: no rank has waited"
        return
    yield from table(("lane", "unit", "ms"), [[lane, unit, milliseconds(waited)] for lane, unit, waited in found[:MOST_UNITS]])
    if len(found) > MOST_UNITS:
        left = sum(waited for _, _, waited in found[MOST_UNITS:])
        yield f"and {len(found) - MOST_UNITS} more with {milliseconds(left)} ms together"


def _communication(numbers: Sequence[RankNumbers]) -> Iterator[str]:
    step = numbers[0].typical
    parts = [f"{count} {kind} ({size(step.received[kind])} received)" for kind, count in sorted(step.collectives.items())]
    yield f"Collectives of a step on rank {numbers[0].rank}: {', '.join(parts) or 'none'}."


def _memory(numbers: Sequence[RankNumbers]) -> Iterator[str]:
    most = max(numbers, key=lambda one: max(step.peak for step in one.steps))
    step = max(most.steps, key=lambda step: step.peak)
    kinds = ", ".join(f"{size(count)} {kind}" for kind, count in sorted(step.held_at_peak.items(), key=lambda one: -one[1]))
    yield f"Peak of the engine's memory: {size(step.peak)} on rank {most.rank} in step {step.number}: {kinds or 'nothing'}."


def _slowest(numbers: Sequence[RankNumbers]) -> Iterator[str]:
    if len(numbers) > 1:
        rank, excess = slowest(numbers)
        yield f"Slowest rank: {rank.rank}, by {milliseconds(excess)} ms of own work over the median of the ranks."


def _clocks(offsets: Sequence[Offset], missing: Sequence[int]) -> Iterator[str]:
    if len(offsets) > 1:
        error = max(one.error for one in offsets)
        how = f"to {milliseconds(error)} ms" if error != float("inf") else "by the clocks of the hosts only"
        yield f"Clocks of the ranks are aligned {how}."
    if missing:
        yield f"No trace of ranks {', '.join(map(str, missing))}: waits for them look like a slow network."


def _advice(advice: Sequence[Advice]) -> Iterator[str]:
    yield "Advice, each for itself:" if advice else "Advice: none. No option is expected to save 2 % of a step."
    for one in advice:
        yield f"- {advice_line(one)}"
