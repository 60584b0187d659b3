"""Makes lanes of the records of a trace: who computes when, which steps there were. Imports no torch.

One thread computes and drives the engine. So at each moment it computes for one unit, or executes a phase of the engine, or does
something outside the model, such as an optimizer step.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from fsdp.debug.tracing.recorder import Collective, Phase, UnitEvent
from state_machine import Event

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
RECOMPUTE: Final = "recompute"
_BEGINS: Final = {Event.PRE_FORWARD: FORWARD, Event.PRE_RECOMPUTE: RECOMPUTE, Event.PRE_BACKWARD: BACKWARD}
_ENDS: Final = {
    Event.POST_FORWARD: FORWARD,
    Event.POST_FORWARD_NO_GRAD: FORWARD,
    Event.FORWARD_FAILED: FORWARD,
    Event.POST_RECOMPUTE: RECOMPUTE,
    Event.POST_BACKWARD: BACKWARD,
    Event.POST_BACKWARD_NO_SYNC: BACKWARD,
    Event.INPUT_GRADS_DONE: BACKWARD,
}
_END_ALL: Final = (Event.FINAL_CALLBACK, Event.FINAL_CALLBACK_NO_SYNC, Event.BACKWARD_FAILED, Event.STEP_ABANDONED)


class Segment(NamedTuple):
    """A stretch of time in which one unit computes."""

    began: int
    ended: int
    unit: int
    kind: str
    """`forward`, `backward` or `recompute`."""


class StepSpan(NamedTuple):
    """One step: from the first forward of a root to that of the next step, or to the end of the trace."""

    began: int
    ended: int
    backward_began: int
    """When the first backward reached a unit; 0 without one."""
    abandoned: bool


def outermost(phases: Sequence[Phase]) -> list[Phase]:
    """The phases that are not inside another one, in order."""
    found: list[Phase] = []
    for phase in sorted(phases, key=lambda one: (one.began, -one.ended)):
        if not found or phase.began >= found[-1].ended:
            found.append(phase)
    return found


def computing(events: Sequence[UnitEvent], phases: Sequence[Phase]) -> list[Segment]:
    """The stretches in which a unit computes, in order: from event to event, without the phases of the engine."""
    engine = outermost(phases)
    segments: list[Segment] = []
    cursor = 0
    for began, ended, unit, kind in _owners(events):
        while cursor < len(engine) and engine[cursor].ended <= began:
            cursor += 1
        at, time = cursor, began
        while at < len(engine) and engine[at].began < ended:
            if engine[at].began > time:
                segments.append(Segment(time, engine[at].began, unit, kind))
            time = max(time, engine[at].ended)
            at += 1
        if time < ended:
            segments.append(Segment(time, ended, unit, kind))
    return segments


def steps(events: Sequence[UnitEvent], roots: Sequence[int], ended: int) -> list[StepSpan]:
    """The steps. One ends when the root has reduced its gradients, or was abandoned, and the next forward begins."""
    found: list[StepSpan] = []
    is_over = True
    for time, unit, event in events:
        if event is Event.PRE_FORWARD and unit in roots and is_over:
            found.append(StepSpan(time, ended, 0, False))
            is_over = False
        if not found:
            continue
        if event is Event.PRE_BACKWARD and not found[-1].backward_began:
            found[-1] = found[-1]._replace(backward_began=time)
        if event in (Event.FINAL_CALLBACK, Event.POST_FORWARD_NO_GRAD) and unit in roots:
            is_over = True
        if event in (Event.BACKWARD_FAILED, Event.STEP_ABANDONED, Event.FORWARD_FAILED):
            found[-1], is_over = found[-1]._replace(abandoned=True), True
    return [*(one._replace(ended=later.began) for one, later in pairwise(found)), *found[-1:]]


def sublanes(collectives: Sequence[Collective], ended: int) -> list[int]:
    """For each collective the number of the first sublane that is free: collectives of one lane may overlap."""
    free: list[int] = []
    found = []
    for one in collectives:
        lane = next((number for number, until in enumerate(free) if until <= one.launched), len(free))
        free[lane : lane + 1] = [one.ended or ended]
        found.append(lane)
    return found


def _owners(events: Sequence[UnitEvent]) -> Iterator[tuple[int, int, int, str]]:
    """From event to event: the unit that computes, and what."""
    stack: list[tuple[int, str]] = []
    before = 0
    for time, unit, event in events:
        if stack and time > before:
            yield before, time, *stack[-1]
        before = time
        if event in _END_ALL:
            stack = [one for one in stack if one[0] != unit]
        elif event in _BEGINS and (unit, _BEGINS[event]) not in stack:
            stack.append((unit, _BEGINS[event]))
        elif event in _ENDS and (ended := (unit, _ENDS[event])) in stack:
            del stack[len(stack) - 1 - stack[::-1].index(ended)]
